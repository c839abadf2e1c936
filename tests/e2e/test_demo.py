"""The whole demo, with models of a few thousand weights."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
METHODS = {"vanilla", "seq", "tree", "magicdec", "untrained"}


def run_demo(output: Path) -> str:
    command = [sys.executable, "-m", "scripts.demo", "--size", "tiny", "--output", str(output)]
    result = subprocess.run(command, cwd=ROOT, text=True, capture_output=True, timeout=900)
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.mark.slow
def test_demo_goes_through_and_a_second_call_skips_what_is_done(tmp_path: Path) -> None:
    """Every step leaves its result, all methods emit vanilla's tokens, and nothing is done twice."""
    said = run_demo(tmp_path)
    assert "done before" not in said
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["family"] == "llama"
    assert set(summary["methods"]) == METHODS
    assert all(figures["same_tokens_as_vanilla"] for figures in summary["methods"].values())
    assert summary["methods"]["vanilla"]["acceptance_length"] == 1
    assert [[line["step"] for line in stage] for stage in summary["stages"]] == [[1, 2, 3, 4]] * 3
    assert summary["teacher_forced_acceptance"] >= 1
    assert (tmp_path / "report.png").stat().st_size > 10_000

    before = (tmp_path / "evaluation" / "results.json").stat().st_mtime_ns
    again = run_demo(tmp_path)
    assert again.count("done before") == 6
    assert (tmp_path / "evaluation" / "results.json").stat().st_mtime_ns == before
    assert said[said.index("method") : said.index("time:")] == again[again.index("method") : again.index("time:")]
