"""`longspec draft` on the CPU with a tiny target: killed in each step, continued, and its draft measured again."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from pipeline_fixtures import make_chat_target, write_text_folder
from training_fixtures import LIMIT_S, ROOT, launch_environment

from longspec import load_pair

pytestmark = pytest.mark.slow

BEGUN = {
    "chat": "answers/chat/train.shards/*",
    "stage1": "training/recipe-0/stage1/last*_ds",
    "evaluation": "evaluation/samples-0.jsonl",
}
"""A file that exists once a step has begun. (Prompts and answers of other steps are written as those of `chat`.)"""


def command(target: Path, root: Path, *arguments: str) -> list[str]:
    line = [sys.executable, "-m", "longspec", "draft", str(target), "--config", "tests/tiny_draft.yaml", "--yes"]
    return [*line, "--output_dir", str(root), *arguments]


def killed(line: list[str], begun: Path, log: Path, whole_group: bool) -> None:
    """Run a command, and kill it, or it and its launchers, once a file matches a pattern. All other processes that it
    has started end by themselves."""
    with log.open("a") as output:
        options = {"cwd": ROOT, "env": launch_environment(), "stdout": output, "stderr": output}
        process = psutil.Popen(line, start_new_session=True, **options)
        deadline = time.monotonic() + LIMIT_S
        while not any(begun.parent.glob(begun.name)):
            assert process.poll() is None and time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.01)
        others = process.children(recursive=True)
        if whole_group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
        process.wait()
    _, alive = psutil.wait_procs(others, timeout=LIMIT_S)
    assert not alive


def finished(root: Path) -> dict[Path, int]:
    """When each complete file of text, prompts and probes was written."""
    files = [file for part in ("answers", "prompts", "probes") for file in root.glob(f"{part}/*/*.jsonl")]
    return {file: file.stat().st_mtime_ns for file in files}


def test_a_run_that_is_killed_in_each_step_continues_and_repeats_nothing(tmp_path: Path) -> None:
    """The number of processes that write text changes on the way."""
    target, texts = make_chat_target(tmp_path / "target"), write_text_folder(tmp_path / "texts")
    root, log = tmp_path / "root", tmp_path / "log"
    before: dict[Path, int] = {}
    for number, begun in enumerate(BEGUN.values()):
        line = command(target, root, f"benchmarks={texts}", f"chat.processes={2 - number % 2}")
        killed(line, root / begun, log, whole_group=number % 2 == 0)
        after = finished(root)
        assert before.items() <= after.items()
        before = after
    result = subprocess.run(
        command(target, root, f"benchmarks={texts}"),
        cwd=ROOT,
        env=launch_environment(),
        text=True,
        capture_output=True,
        timeout=LIMIT_S,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert before.items() <= finished(root).items()

    starts = re.findall(r"steps (\d+) … 60", (root / "training/recipe-0/stage1/log.txt").read_text())
    assert starts[0] == "1" and int(starts[-1]) > 1, "stage 1 resumed from a checkpoint"
    steps = [json.loads(line)["step"] for line in (root / "training/recipe-0/stage1/metrics.jsonl").open()]
    assert steps == list(range(1, 61))
    samples = [json.loads(line) for line in (root / "evaluation/samples-0.jsonl").open()]
    keys = [tuple(sample[name] for name in ("task", "context", "method", "temperature", "id")) for sample in samples]
    assert len(set(keys)) == len(keys)

    summary = json.loads((root / "summary.json").read_text())
    assert [row["stage"] for row in summary["tables"]["Training"]] == ["stage1", "stage2", "stage3"]
    assert {row["method"] for row in summary["tables"]["Methods"]} == {"vanilla", "tree", "lookup", "auto"}
    assert "900 over 400" in summary["tables"]["The same text"][0]
    for name in ("report.md", "contexts.png", "tokens_per_second.png", "draft/README.md"):
        assert (root / name).stat().st_size > 0
    *_, chat, serve, bench, last = result.stdout.splitlines()
    for line, name in ((chat, "chat"), (serve, "serve"), (bench, "bench")):
        assert line == f"longspec {name} {target} --draft {root / 'draft'}"
    assert "prompt lookup" in last
    pair, _ = load_pair(str(target), draft=str(root / "draft"))
    assert pair.draft_is_trained

    again = command(target, tmp_path / "again", "--evaluate", str(root / "draft"), "chat.processes=1")
    tasks = "evaluation.tasks={everyday: {contexts: [0], max_new_tokens: 8, prompts: 1}}"
    methods = "evaluation.methods=[{name: vanilla, prompts: 1}, {name: tree, prompts: 1}, {name: lookup, prompts: 1}]"
    line = [*again, tasks, methods]
    result = subprocess.run(line, cwd=ROOT, env=launch_environment(), text=True, capture_output=True, timeout=LIMIT_S)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
