"""`longspec`'s commands, options and errors, without a model."""

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import get_args
from unittest.mock import Mock

import pytest
from pairs import save_target
from training_fixtures import make_target
from typer.testing import CliRunner

from longspec.cli import app as console
from longspec.cli.options import Dtype, Method
from longspec.cli.prompts import read_prompts
from longspec.cli.train import ROOT
from longspec.command_line import DTYPES
from longspec.errors import UserError
from longspec.inference.methods import AUTO, METHODS
from longspec.models.target_split import rank_folder
from longspec.pipeline.run import ask

TINY = "tiny_glide_stage1_sinkpi-slicing"
COMMANDS = ("chat", "generate", "serve", "bench", "evaluate", "regenerate", "train", "extract", "split")
HELP = f"""
import sys
from typer.testing import CliRunner
from longspec.cli.app import app
for command in ([], *([name] for name in {[name for name in COMMANDS if name not in ("evaluate", "regenerate")]!r})):
    result = CliRunner().invoke(app, [*command, "--help"])
    assert result.exit_code == 0, result.output
assert not [name for name in ("torch", "transformers", "datasets", "matplotlib") if name in sys.modules]
"""


def test_help_imports_no_torch() -> None:
    shown = subprocess.check_output([sys.executable, "-m", "longspec", "--help"], cwd=ROOT, text=True)
    assert all(name in shown for name in COMMANDS)
    subprocess.run([sys.executable, "-c", HELP], cwd=ROOT, check=True)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_an_output_that_cannot_be_written_is_one_line() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "longspec", "--help"]
        done = subprocess.run(command, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    problem = "error: the output or a file cannot be written (No space left on device)\n"
    assert (done.returncode, done.stderr) == (2, problem)


def test_the_end_of_the_input_agrees_to_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-D where `longspec draft` asks whether to start."""
    monkeypatch.setattr(sys, "stdin", Mock(isatty=lambda: True))
    monkeypatch.setattr("builtins.input", Mock(side_effect=EOFError))
    with pytest.raises(SystemExit, match="1"):
        ask()


def test_the_options_name_what_there_is() -> None:
    """They are written out once more because a Literal takes no variables."""
    assert get_args(Method) == (*METHODS, AUTO) and get_args(Dtype) == DTYPES


@pytest.mark.parametrize(("command", "group"), [("evaluate", "decoding"), ("regenerate", "answers")])
def test_commands_with_a_parser_of_their_own_get_all_arguments(command: str, group: str) -> None:
    result = CliRunner().invoke(console.app, [command, "--help"])
    assert result.exit_code == 0 and f"usage: longspec {command}" in result.output
    assert f"\n{group}:\n" in result.output and f"\nexamples:\n  longspec {command}" in result.output
    assert "(default: 0)" in result.output and "(default: None)" not in result.output
    assert CliRunner().invoke(console.app, [command, "--no_such_option"]).exit_code == 2


def test_bad_input_is_one_line_and_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, refusal: Callable[..., str], tmp_path: Path
) -> None:
    for given, part in (
        (["chat", f"{tmp_path}/none"], "no such folder"),
        (["generate", "none.csv"], "none.csv: no such file; if the text itself is the prompt, give it on stdin"),
        (["generate", "hello", "--top_p", "0"], "top_p"),
        (["generate", "hello", "--logit_bias", '{"a": 1}'], "logit_bias: 'a' is not a token id\n"),
        (["generate", "hello", "--tree_shape", "2", "4"], "--tree_shape 2, prompt 4: write levels as in 4,16,16"),
        (["generate", "hi", "--model", "./none", "--tree_nodes", "1"], "tree_nodes: 1; it must be"),
        (["regenerate", "--target", "./none", "--count", "1", "--output_dir", "a", "--tree_nodes", "1"], "nodes: 1"),
        (["evaluate", "--target", "./n", "--task", "lcc", "--data_path_prefix", ".", "--tree_nodes", "1"], "nodes: 1"),
        (["bench", "./none", "--png", "a.pdf"], "--png a.pdf: the picture is a PNG"),
        (["bench", "--no_such_option"], "no such option: --no_such_option (see --help)"),
        (["extract"], "missing argument"),
        (["generate", "hello", "--output", "--overwrite"], "--overwrite: an option where a path is expected"),
        (["train", "no-such-config"], "tiny_glide_stage1"),
        (["split", "--target", f"{tmp_path}/none", "--tp_size", "2", "--output", f"{tmp_path}/split"], "no model"),
    ):
        monkeypatch.setattr(sys, "argv", ["longspec", *given])
        assert part in f"{refusal(console.main)}\n"


@pytest.fixture
def experiment(tmp_path: Path) -> list[str]:
    """The tiny experiment with a target and a file of five records."""
    make_target(tmp_path / "target", "mistral")
    (tmp_path / "blank.jsonl").write_text(" \n\n")
    (tmp_path / "array.json").write_text('[{"text": "one"}]\n')
    (tmp_path / "a b.jsonl").write_text('{"text": "one"}\n\n' * 5)
    return ["train", TINY, f"model_name_or_path={tmp_path}/target", f"data.files=[{tmp_path}/a b.jsonl]", "--dry_run"]


def test_train_checks_the_configuration_and_prints_the_launch_line(experiment: list[str], tmp_path: Path) -> None:
    given = [*experiment, "--num_gpus", "2"]
    *derived, line = CliRunner().invoke(console.app, given).stdout.splitlines()
    assert "-m deepspeed.launcher.runner --log_level critical --num_gpus 2" in line
    assert line.endswith(f"-cp {ROOT}/conf/exp -cn {TINY} {given[2]} '{given[3]}'")
    assert derived == ["data: 85 bytes, files: 1, records: 5", "step: 16 rows of up to 128 tokens, 2,048 in all"]
    for name, wrong, named in (
        (TINY, "max_step=3", "max_step: no such key"),
        (TINY, f"evaluation.files={tmp_path}/blank.jsonl", "blank.jsonl: all lines are blank"),
        (TINY, f"data.files={tmp_path}/array.json", "array.json, line 1: must be a JSON object with named fields"),
        ("my-model", "seed=3", "config name my-model: no such experiment"),
        (TINY, "draft_model_name_or_path=./none.pth", "./none.pth: no such draft"),
    ):
        result = CliRunner().invoke(console.app, ["train", name, *given[2:], wrong])
        assert isinstance(result.exception, UserError) and named in str(result.exception) and not result.stdout


@pytest.mark.parametrize(
    ("options", "derived"),
    [
        (["--include", "localhost:0,1"], ["step: 4 rows of up to 128 tokens, 512 in all"]),
        (["--num_gpus", "2", "hostfile"], []),
        (["max_steps=1200"], ["run: 1,200 steps"]),
        (
            ["--num_gpus", "1", "data.pack=false", "data.overflow=truncate", "num_train_epochs=3"],
            [
                "step: 2 rows of up to 128 tokens, 256 in all",
                "epoch: 2.5 steps, if all records are used",
                "run: 8 steps",
            ],
        ),
    ],
)
def test_a_dry_run_prints_what_is_known(
    options: list[str], derived: list[str], experiment: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hostfile: DeepSpeed's launcher finds a list of hosts, whose GPUs this one does not know."""
    if options[-1] == "hostfile":
        options = options[:-1]
        monkeypatch.setattr("longspec.cli.train.HOSTFILE", tmp_path)
    given = [*experiment, "gradient_accumulation_steps=1", "per_device_train_batch_size=2", *options]
    result = CliRunner().invoke(console.app, given)
    assert result.stdout.splitlines()[1:-1] == derived, result.exception


def test_training_runs_on_the_visible_devices(monkeypatch: pytest.MonkeyPatch, experiment: list[str]) -> None:
    """DeepSpeed's launcher ignores CUDA_VISIBLE_DEVICES next to --num_gpus."""
    given = [*experiment, "--num_gpus"]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.delenv("DS_ACCELERATOR", raising=False)
    for visible, ranks, expected in (
        ("4, 6,7", "2", "--include localhost:4,6"),
        ("5", "1", "--include localhost:5"),
        ("GPU-8932f937", "1", "--num_gpus 1"),
        ("", "2", "--num_gpus 2"),
    ):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert f" {expected} " in CliRunner().invoke(console.app, [*given, ranks]).stdout
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1,2")
    result = CliRunner().invoke(console.app, [*given, "3"])
    assert isinstance(result.exception, UserError) and "--num_gpus: 3" in str(result.exception) and not result.stdout


def test_split_writes_a_folder_per_rank(tmp_path: Path) -> None:
    target = save_target(tmp_path / "target", "llama")
    given = ["split", "--target", str(target), "--tp_size", "2", "--output", str(tmp_path / "out")]
    assert CliRunner().invoke(console.app, given).exit_code == 0
    assert (tmp_path / "out" / rank_folder(1, 2) / "config.json").is_file()
    assert "exists already" in str(CliRunner().invoke(console.app, given).exception)


def test_prompts_come_from_arguments_and_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\n two \n")
    lines = ['{"id": 7, "prompt": "three "}', '{"messages": [{"role": "user", "content": "4"}]}']
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    prompts = read_prompts([str(tmp_path / "a.txt"), "Is this a.txt", str(tmp_path / "b.jsonl")])
    contents = [prompt.content for prompt in prompts]
    assert contents == ["one", "two", "Is this a.txt", "three ", [{"role": "user", "content": "4"}]]
    assert prompts[3].record == {"id": 7, "prompt": "three "}
    (tmp_path / "c.NDJSON").write_text('{"prompt": "5", "system": "S", "text": "old answer", "top_p": null}\n')
    (prompt,) = read_prompts([str(tmp_path / "c.NDJSON")])
    assert prompt.content == [{"role": "system", "content": "S"}, {"role": "user", "content": "5"}]


@pytest.mark.parametrize("name", ["a.csv", "a.jsonl.gz", "prompts", "folder.d"])
def test_a_file_of_another_kind_is_not_taken_for_a_prompt(name: str, tmp_path: Path) -> None:
    """Its name would be answered."""
    (tmp_path / name).mkdir() if name == "folder.d" else (tmp_path / name).write_text('{"prompt": "a"}\n')
    with pytest.raises(UserError, match=rf"{name}: .*\.txt.*\.jsonl"):
        read_prompts([str(tmp_path / name)])
    assert read_prompts([f"{tmp_path / name} is a file"])


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ('{"text": "a"}', "'prompt' is missing"),
        ('{"messages": [{"role": "assistant", "content": "a"}]}', "ends with a user turn"),
        ('{"messages": [{"role": "user"}]}', r"'messages\[0\]\.content'"),
        ('{"prompt": "a", "max_tokens": 3}', "'max_tokens' is not read"),
        ('{"prompt": "a", "suffix": "b"}', "'suffix' would be ignored"),
        ('{"messages": [{"role": "user", "content": "a"}], "tools": [{}]}', "'tools' would be ignored"),
        ("{", "not a JSON line"),
    ],
)
def test_a_record_without_a_prompt_is_named(line: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "b.jsonl").write_text('{"prompt": "a"}\n' + line + "\n")
    with pytest.raises(UserError, match=rf"b\.jsonl, line 2.*{problem}"):
        read_prompts([str(tmp_path / "b.jsonl")])


@pytest.mark.parametrize("place", ["longspec.cli.app.app", "longspec.cli.generate.loading"])
def test_a_signal_that_ends_a_command_is_named(
    place: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["longspec", "generate", "hello"])
    monkeypatch.setattr(place, lambda *_, **__: signal.raise_signal(signal.SIGTERM))
    with pytest.raises(SystemExit) as end:
        console.main()
    assert (end.value.code, capsys.readouterr().err) == (143, "stopped by SIGTERM\n")
