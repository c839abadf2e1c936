"""The whole experiment on the CPU, step by step as a user runs it, with a tiny target."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from experiment_fixtures import make_chat_target, write_text_folder
from training_fixtures import ROOT, launch_environment

pytestmark = pytest.mark.slow


def run(step: str, *arguments: str) -> str:
    line = [sys.executable, "-m", "experiments", step, "--config", "tests/tiny_experiment.yaml", *arguments]
    result = subprocess.run(line, cwd=ROOT, env=launch_environment(), text=True, capture_output=True, timeout=600)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    return result.stdout


def test_all_steps_leave_a_report_and_train_nothing_twice(tmp_path: Path) -> None:
    target, texts = make_chat_target(tmp_path / "target"), write_text_folder(tmp_path / "texts")
    root, page = tmp_path / "root", tmp_path / "report"
    arguments = ["--text", str(texts), "--root", str(root), f"target={target}", f"report={page}"]
    run("all", *arguments)
    summary = json.loads((page / "summary.json").read_text())
    assert [row["stage"] for row in summary["tables"]["Recipe"]] == ["stage1", "stage2", "stage3"]
    assert all(row["eval_acceptance_length"] >= 1 for row in summary["tables"]["Recipe"])
    assert [stage["trainer.model.kv_layers"] for stage in summary["training"].values()] == [[18], [], []]
    methods = {row["method"] for row in summary["tables"]["Methods"]}
    assert methods == {"vanilla", "tree", "lookup"}
    greedy = next(row for row in summary["tables"]["Claims of the paper"] if row["claim"].startswith("Greedy"))
    assert greedy["verdict"] == "holds"
    assert len(summary["tables"]["Diagnostics"]) == 3
    same_text = summary["tables"]["The same text"]
    assert [row["task"] for row in same_text] == ["all", "lcc"] * 2 and "900 over 400" in same_text[0]
    assert {row["task"] for row in summary["tables"]["Methods"]} == {"all", "lcc", "gsm8k", "chat", "everyday"}
    for name in ("README.md", "contexts.png", "tokens_per_second.png", "samples.jsonl"):
        assert (page / name).stat().st_size > 0
    logs = {path: path.read_text() for path in root.rglob("log.txt")}
    run("train", *arguments)
    assert len(logs) == 3 and logs == {path: path.read_text() for path in root.rglob("log.txt")}
