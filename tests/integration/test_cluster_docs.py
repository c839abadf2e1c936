"""The launch lines for clusters: options of the launchers and of the commands that they start exist."""

import re
import shlex
from pathlib import Path

import pytest
from deepspeed.launcher.runner import parse_args as parse_deepspeed
from test_docs import blocks
from torch.distributed.run import get_args_parser

from longspec.longbench.command import parse_options
from longspec.regenerate.command import _parser
from longspec.train.config import compose_config, typed

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "clusters.md"
SLURM = {"SLURM_NNODES": "2", "SLURM_JOB_ID": "7", "HEAD": "host0"}


def launch_lines(launcher: str) -> list[list[str]]:
    """The words after `launcher` in each line of the page that calls it."""
    text = "".join(blocks(PAGE, "bash") + blocks(PAGE, "sh")).replace("\\\n", " ")
    text = re.sub(r"\$(\w+)", lambda match: SLURM.get(match[1], match[0]), text)
    lines = [shlex.split(line, comments=True) for line in text.splitlines() if f"{launcher} " in line]
    return [line[line.index(launcher) + 1 :] for line in lines]


def check_training(arguments: list[str]) -> None:
    folder, name = arguments[arguments.index("-cp") + 1], arguments[arguments.index("-cn") + 1]
    typed(compose_config(folder, name, [word for word in arguments if "=" in word]))


def test_torchrun_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    scripts = []
    for line in launch_lines("torchrun"):
        launch = get_args_parser().parse_args(line)
        script, arguments = launch.training_script, launch.training_script_args
        assert launch.module or Path(script).is_file()
        scripts.append(script)
        if script == "./trainer_base_ds_mul_fs_tp.py":
            check_training(arguments)
        elif script == "inference_long-bench.py" or arguments[0] == "evaluate":
            parse_options(arguments[launch.module :])
        elif arguments[0] == "regenerate":
            _parser("regenerate").parse_args(arguments[1:])
    assert len(scripts) == 8 and {"longspec", "inference_long-bench.py", "./trainer_base_ds_mul_fs_tp.py"} == {*scripts}


def test_deepspeed_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    (line,) = launch_lines("deepspeed")
    launch = parse_deepspeed(line)
    assert launch.hostfile == "hosts" and Path(launch.user_script).is_file()
    check_training(launch.user_args)
