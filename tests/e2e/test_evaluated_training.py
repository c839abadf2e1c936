"""Evaluation during training on two ranks: it leaves training unchanged, resumes repeat it, the best draft is kept."""

import json
import shutil
from pathlib import Path

import pytest
from training_fixtures import SHARDED, TINY, equal_drafts, launched, lose_newest, metrics, overrides_of, timeless

from longspec.train.markers import damage

pytestmark = pytest.mark.slow
STEPS = 6


def overrides(work: Path, output: Path, *more: str) -> list[str]:
    return overrides_of(work, output, *SHARDED, f"max_steps={STEPS}", "save_steps=2", "learning_rate=5e-3", *more)


def evaluated(work: Path) -> list[str]:
    """3 rows on 2 ranks, so that one of them has nothing to do in the last round."""
    wanted = {"files": f"{work}/held_out.jsonl", "steps": 2, "rows": 3, "keep_best": "true"}
    return [f"evaluation.{key}={value}" for key, value in wanted.items()]


@pytest.fixture(scope="module")
def runs(work: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run without evaluation in `plain`, one with it in `evaluated`, under ZeRO-3. (Those of
    tests/e2e/test_equivalence.py evaluate under each stage.)"""
    runs = tmp_path_factory.mktemp("runs")
    launched(TINY, *overrides(work, runs / "plain"))
    launched(TINY, *overrides(work, runs / "evaluated", *evaluated(work)))
    return runs


def test_training_does_not_notice(runs: Path) -> None:
    plain, watched = runs / "plain", runs / "evaluated"
    trained = [{name: value for name, value in line.items() if "eval" not in name} for line in timeless(watched)]
    assert timeless(plain) == trained and len(trained) == STEPS
    assert equal_drafts(plain / "checkpoint-last", watched / "checkpoint-last")
    lines = metrics(watched)
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4, 6]
    losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert losses[0] > losses[1] > losses[2], "the draft learns, and the evaluation sees the present one"
    for line in (line for line in lines if "eval_loss" in line):
        assert 1 <= line["eval_acceptance_length"] <= 6
        assert all(0 <= line[f"eval_top1_lag_{lag}"] <= 1 for lag in range(1, 6))


def test_a_resumed_run_repeats_it(work: Path, runs: Path, tmp_path: Path) -> None:
    """Steps 5 and 6 run again from the older checkpoint, with a best draft that may be of step 6."""
    straight, again = runs / "evaluated", tmp_path / "again"
    shutil.copytree(straight, again)
    lose_newest(again)
    assert "steps 5 … 6" in launched(TINY, *overrides(work, again, *evaluated(work), "resume=latest"))
    assert timeless(straight) == timeless(again)
    assert equal_drafts(straight / "checkpoint-best", again / "checkpoint-best")


def test_the_best_draft_is_whole_and_says_why(runs: Path) -> None:
    """The first of the largest acceptance length; where it is the last step's, it is that checkpoint's draft."""
    output = runs / "evaluated"
    best = json.loads((output / "checkpoint-best" / "evaluation.json").read_text())
    lines = [line for line in metrics(output) if "eval_loss" in line]
    chosen = max(lines, key=lambda line: line["eval_acceptance_length"])
    assert best == {name: chosen[name] for name in best} and {"step", "eval_loss", "eval_top1_lag_5"} <= best.keys()
    assert damage(output / "checkpoint-best") is None
    assert (output / "checkpoint-best" / "tokenizer.json").is_file()
    saved = {4: "checkpoint-2last", 6: "checkpoint-last"}
    for step, name in saved.items():
        assert equal_drafts(output / "checkpoint-best", output / name) == (best["step"] == step)
