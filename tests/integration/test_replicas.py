"""Commands on several ranks: the results of a single process, whatever happens to the ranks."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
from forked_ranks import exit_code, start_forked
from test_command import ROOT, SHORT, draft_of, make_target, write_records
from test_run_folder import COUNTS
from training_fixtures import launch_environment

from longspec.locks import LOCK_NAME
from longspec.longbench.command import main
from scripts.pipeline.machine import free_port

SAMPLED = ("--method", "seq", "--max_gen_len", "6", "--temperature", "1", "--batch_size", "2")
TIMES = ("ttft_s", "decode_s", "tokens_per_second")
LIMIT_S = 120


@pytest.fixture(scope="module")
def line(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Options of a run of eleven samples of uneven lengths, without its output folder."""
    folder = tmp_path_factory.mktemp("pair")
    target, data = make_target(folder / "target"), write_records(folder / "data", count=11)
    pair = ["--target", str(target), "--draft", str(draft_of(target)), "--task", "lcc", "--data_path_prefix", str(data)]
    return [*pair, "--device", "cpu", *SHORT, *SAMPLED]


@pytest.fixture(scope="module")
def alone(line: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a single process."""
    out = tmp_path_factory.mktemp("alone") / "out"
    main([*line, "--output_dir", str(out)])
    return out


class Launch:
    """A finished launch: exit code of each rank, stdout and stderr of all."""

    def __init__(self, script: str, arguments: list[str], folder: Path, ranks: int = 2, **environment: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / "stdout", folder / "stderr"]
        for file in files:
            file.write_text("")
        environment = launch_environment(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}", **environment)
        started = start_forked(script, arguments, ranks, free_port(), environment, *files)
        exit_code(started, LIMIT_S)
        self.codes = [rank.exitcode for rank in started]
        self.stdout, self.stderr = (file.read_text() for file in files)

    @property
    def said(self) -> list[str]:
        """The lines of stderr, without progress bars."""
        return [text for text in re.split(r"[\r\n]+", self.stderr) if text.strip() and "%|" not in text]


def evaluate(line: list[str], out: Path, ranks: int = 2, fault: str | None = None) -> Launch:
    script = "tests/faulty_evaluation.py" if fault else "inference_long-bench.py"
    environment = {"FAULT": fault} if fault else {}
    return Launch(script, [*line, "--output_dir", str(out)], out.parent / "logs", ranks, **environment)


def records(out: Path) -> list[dict[str, Any]]:
    """The lines of results, without times and memory."""
    lines = [json.loads(raw) for raw in (out / "samples.jsonl").read_text().splitlines()]
    for record in lines:
        del record["batch"]["peak_memory_bytes"]
    return [{name: value for name, value in record.items() if name not in TIMES} for record in lines]


def on_disk(out: Path) -> dict[int, str]:
    """All lines of the samples that are saved, times included."""
    files = [file for file in out.iterdir() if file.name.startswith("samples.jsonl")]
    raw = [text for file in files for text in file.read_text().splitlines(keepends=True) if text.endswith("\n")]
    return {json.loads(text)["index"]: text for text in raw}


def check_complete(out: Path, alone: Path) -> None:
    """The folder holds what a single process writes, in the same order, and nothing else."""
    assert records(out) == records(alone)
    assert sorted(file.name for file in out.iterdir()) == [LOCK_NAME, "run.json", "samples.jsonl", "summary.json"]
    one, other = (json.loads((folder / "summary.json").read_text()) for folder in (out, alone))
    assert {name: one[name] for name in COUNTS} == {name: other[name] for name in COUNTS}


def test_ranks_write_what_a_single_process_writes(line: list[str], alone: Path, tmp_path: Path) -> None:
    launch = evaluate(line, tmp_path / "out")
    assert launch.codes == [0, 0], launch.stderr
    check_complete(tmp_path / "out", alone)
    assert json.loads((tmp_path / "out/summary.json").read_text())["processes"] == 2
    assert launch.stdout.count("acceptance length") == launch.stdout.count("11 prompts kept") == 1
    assert launch.said == [] and "11/11" in launch.stderr
