"""The documentation: its command lines parse, its links lead to files, and the README's example runs as it stands."""

import ast
import importlib
import os
import re
import shlex
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from deepspeed.launcher.runner import parse_args as parse_deepspeed
from pairs import save_target
from torch.distributed.run import get_args_parser
from training_fixtures import ROOT, launch, make_target, metrics, write_texts

import longspec
from longspec import generate, load_pair
from longspec.cli.app import app
from longspec.errors import UserError
from longspec.inference import methods
from longspec.inference.drafting import decoders
from longspec.longbench.command import parse_options
from longspec.models import architectures
from longspec.pipeline import command as draft_command
from longspec.regenerate import command as regenerate_command
from longspec.train.config import compose_config, read_config_file, typed_with_auto
from longspec.train.resume import with_draft_options

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
ASSIGNMENT = re.compile(r"([A-Z]\w*)=(\S+)")
LINK = re.compile(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)")


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> Iterator[list[str]]:
    """The words of each command line on a page, with the variables that the page sets replaced by their values."""
    variables: dict[str, str] = {}
    for line in "".join(blocks(page, "bash")).replace("\\\n", " ").splitlines():
        line = re.sub(r"\$\{?(\w+)\}?", lambda match: variables[match[1]], line)
        if match := ASSIGNMENT.fullmatch(line):
            variables[match[1]] = match[2]
        else:
            yield shlex.split(line, comments=True)


@pytest.fixture
def composes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str, str, list[str]], None]:
    """Composes the configuration of a training command, with a tiny target."""
    monkeypatch.chdir(ROOT)
    target = f"model_name_or_path={save_target(tmp_path / 'target', 'llama')}"

    def compose(folder: str, name: str, overrides: list[str]) -> None:
        typed_with_auto(compose_config(folder, name, [*overrides, target]))

    return compose


def check(call: list[str], composes: Callable[[str, str, list[str]], None]) -> None:
    """The name, the options and the values of a call exist; a training command also composes."""
    program, *given = call
    if program == "./trainer_base_ds_mul_fs_tp.py":
        folder, name = given[given.index("-cp") + 1], given[given.index("-cn") + 1]
        composes(folder, name, [word for word in given if "=" in word])
    elif program == "inference_long-bench.py":
        parse_options(given)
    elif program == "longspec.regenerate":
        regenerate_command._parser("regenerate").parse_args(given)
    else:
        name, *rest = given
        group = typer.main.get_command(app)
        context = group.commands[name].make_context(name, list(rest))  # type: ignore[attr-defined]
        if name == "train":
            composes("conf/exp", context.params["config"], context.params["overrides"])
        elif name == "evaluate":
            parse_options(rest)
        elif name == "regenerate":
            regenerate_command._parser("regenerate").parse_args(rest)
        elif name == "draft":
            draft_command._parser("draft").parse_intermixed_args(rest)


@pytest.mark.parametrize(
    "program", ["./trainer_base_ds_mul_fs_tp.py", "inference_long-bench.py", "longspec.regenerate", "longspec"]
)
def test_documented_commands_parse(program: str, composes: Callable[[str, str, list[str]], None]) -> None:
    words = [line for page in PAGES for line in commands(page)]
    calls = [line[line.index(program) :] for line in words if program in line]
    assert calls, f"no page calls {program}"
    for call in calls:
        check(call, composes)


def test_python_examples_import_names_that_exist() -> None:
    for page in PAGES:
        for block in blocks(page, "python"):
            for node in ast.walk(ast.parse(block)):
                if isinstance(node, ast.ImportFrom):
                    module = importlib.import_module(str(node.module))
                    assert all(hasattr(module, alias.name) for alias in node.names), f"{page.name}: {ast.unparse(node)}"


def test_launch_lines_for_clusters(composes: Callable[[str, str, list[str]], None]) -> None:
    """Options of torchrun and of DeepSpeed's launcher, and of the commands that they start, exist."""
    page, counts = ROOT / "docs" / "clusters.md", Counter[str]()
    text = "".join(blocks(page, "bash") + blocks(page, "sh")).replace("\\\n", " ")
    text = re.sub(r"\$(\w+)", lambda match: {"SLURM_NNODES": "2"}.get(match[1], match[1]), text)
    for line in text.splitlines():
        words = shlex.split(line, comments=True)
        if "torchrun" in words:
            launch: Any = get_args_parser().parse_args(words[words.index("torchrun") + 1 :])
            call = [launch.training_script, *launch.training_script_args]
        elif "deepspeed" in words:
            launch = parse_deepspeed(words[words.index("deepspeed") + 1 :])
            call = [launch.user_script, *launch.user_args]
        else:
            continue
        counts[call[0]] += 1
        check(call, composes)
    assert counts.keys() == {"longspec", "inference_long-bench.py", "./trainer_base_ds_mul_fs_tp.py"}


def test_links_lead_to_files() -> None:
    for page in PAGES:
        for link in LINK.findall(page.read_text()):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_own_method_page_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """With a tiny target. The drafter's tokens are accepted, also in a batch, and the output is the target's own."""
    make_target(tmp_path / "pair")
    (example,) = blocks(ROOT / "docs" / "own-method.md", "python")
    names: dict[str, Any] = {"__name__": "page"}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(methods, "_own", {})
        exec(compile(example.replace("smollm2-135m", str(tmp_path / "pair")), "own-method.md", "exec"), names)
        assert re.search(r"\d\.\d\d tokens per round", capsys.readouterr().out)
        model, prompts = names["model"], torch.tensor([[5, 6, 7, 5, 6, 7, 5], [9, 8, 9, 8, 9, 8, 0]])
        mask = torch.tensor([[1] * 7, [1] * 6 + [0]])
        for settings in ({}, {"temperature": 0.05, "top_k": 2, "seed": 3}):
            settings = settings | {"max_new_tokens": 40}
            outputs = [generate(model, prompts, mask, method=name, **settings) for name in ("bigrams", "vanilla")]
            assert outputs[0].stats.mean_acceptance_length > 1
            if "temperature" not in settings:
                assert torch.equal(outputs[0].sequences, outputs[1].sequences)


def train_as_documented(page: Path, text: str, script: Path, option: str, *more: str) -> None:
    """Launch a page's script as one rank on the CPU, with the page's overrides of `option`, for a run of two steps."""
    folder = script.parent
    make_target(folder / "target")
    write_texts(folder / "data.jsonl", count=6)
    script.write_text(text)
    line, *_ = commands(page)
    overrides = [word for word in line if word.startswith(option)]
    overrides += [f"model_name_or_path={folder}/target", f"data.files=[{folder}/data.jsonl]", "max_steps=2"]
    overrides += [f"output_dir={folder}/out", f"data.cache_dir={folder}/cache", "data.max_length=64"]
    overrides += ["per_device_train_batch_size=1", "gradient_accumulation_steps=1"]
    done = launch("your-model", *overrides, "data.num_proc=1", "data.num_workers=0", *more, ranks=1, script=str(script))
    assert done.returncode == 0, done.stderr


def test_own_loss_page_trains(tmp_path: Path) -> None:
    page = ROOT / "docs" / "own-loss.md"
    (script,) = blocks(page, "python")
    train_as_documented(page, script, tmp_path / "train_mine.py", "loss=")
    assert [line["step"] for line in metrics(tmp_path / "out")] == [1, 2]
    assert all(0 < line["loss"] < 1 for line in metrics(tmp_path / "out"))


def test_own_draft_page_trains_and_decodes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The toy's saved draft is loaded, and its tree is accepted in part."""
    page = ROOT / "docs" / "own-draft.md"
    script, measuring = blocks(page, "python")
    assert len(script.splitlines()) <= 80
    more = ("model.architecture_options.width=48", "learning_rate=0.01", "max_steps=4")
    train_as_documented(page, script, tmp_path / "train_toy.py", "model.", *more)
    losses = [line["loss"] for line in metrics(tmp_path / "out")]
    assert losses[-1] < losses[0]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(architectures, "_classes", dict(architectures._classes))
        patch.setattr(decoders, "_decoders", dict(decoders._decoders))
        patch.syspath_prepend(tmp_path)
        patch.delitem(sys.modules, "train_toy", raising=False)
        measuring = measuring.replace("TARGET", f"{tmp_path}/target").replace("outputs/toy", f"{tmp_path}/out")
        names: dict[str, Any] = {}
        exec(compile(measuring, "own-draft.md", "exec"), names)
        figures = dict(re.findall(r"(\w+): (\d\.\d\d) tokens per round", capsys.readouterr().out))
        assert float(figures["tree"]) > float(figures["vanilla"]) == 1
        model, prompts = names["model"], [[5, 6, 7, 8], [9, 8]]
        assert type(model.draft_model).__name__ == "ToyDraft" and model.draft_model.options.width == 48
        for method in ("seq", "auto"):
            greedy = [generate(model, prompts, method=name, max_new_tokens=24) for name in ("vanilla", method)]
            assert torch.equal(greedy[0].sequences, greedy[1].sequences)
        # A later stage has the draft's architecture without naming it.
        checkpoint = tmp_path / "out" / "checkpoint-last"
        run = read_config_file(checkpoint / "training_config.yaml")
        plain = replace(run.model, architecture="glide", architecture_options={})
        assert with_draft_options(replace(run, model=plain), None, str(checkpoint)).model.draft_options.width == 48
    with pytest.raises(UserError, match="no draft architecture 'toy'"):
        load_pair(str(tmp_path / "target"), draft=str(tmp_path / "out" / "checkpoint-last"))


def test_api_reference_describes_the_public_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pdoc")
    from scripts import api_reference

    monkeypatch.setattr(sys, "argv", ["api_reference", str(tmp_path)])
    api_reference.main()
    page = (tmp_path / "longspec.html").read_text()
    assert all(f'id="{name}"' in page for name in longspec.__all__) and "Continue prompts losslessly" in page
    assert all((tmp_path / f"{name.replace('.', '/')}.html").is_file() for name in api_reference.MODULES)


EQUAL_TIMES = """
from longspec.inference.adaptive.time_cache import RoundTimes
from longspec.inference.engine import batch
batch.measure_times = lambda _, rounds, *__: RoundTimes((64, 128), {plan.name: (1.0, 1.0) for plan in rounds}, 0.0)
"""
"""Makes rounds of all plans equally long. On a busy machine, measured times can make vanilla the fastest plan."""


@pytest.mark.slow
def test_readme_example_runs(tmp_path: Path) -> None:
    (example,) = blocks(ROOT / "README.md", "python")
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", EQUAL_TIMES + example]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    answer, figure = done.stdout.splitlines()
    assert answer.startswith("Regular exercise offers numerous benefits for both physical and mental health.")
    (length,) = re.fullmatch(r"([1-5]\.\d\d) tokens per round", figure).groups()  # type: ignore[union-attr]
    assert float(length) > 1
