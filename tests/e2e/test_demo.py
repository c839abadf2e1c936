"""The whole demo, with a tiny target and a random draft."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from experiment_fixtures import make_chat_target
from training_fixtures import ROOT, launch_environment

from longspec import load_pair

STAGE = "training.stages.stage1.overrides={model.kv_layers: [1], model.draft_vocabulary: 128, variant.max_offset: 64}"


@pytest.mark.slow
def test_the_demo_compares_all_methods_and_trains_three_stages(tmp_path: Path) -> None:
    """Without a terminal, the answers are plain lines, and stdout has no control codes."""
    target = make_chat_target(tmp_path / "target")
    pair, _ = load_pair(str(target))
    torch.save(pair.draft_model.state_dict(), tmp_path / "draft.pth")
    overrides = [f"target={target}", f"evaluation.draft={tmp_path / 'draft.pth'}", f"root={tmp_path / 'demo'}", STAGE]
    line = [sys.executable, "-m", "experiments.demo", *overrides]
    environment = launch_environment(XDG_CACHE_HOME=str(tmp_path / "cache"))
    result = subprocess.run(line, cwd=ROOT, env=environment, text=True, capture_output=True, timeout=900)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]
    assert "vanilla, " in result.stdout and "\x1b" not in result.stdout
    summary = json.loads((tmp_path / "demo" / "summary.json").read_text())
    assert set(summary["comparison"]["methods"]) == {"vanilla", "lookup", "chain", "tree", "auto"}
    assert list(summary["losses"]) == ["stage1", "stage2", "stage3"]
    assert (tmp_path / "demo" / "report.png").stat().st_size > 10_000
