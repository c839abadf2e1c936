"""Evaluation during training on two ranks: it leaves training unchanged, resumes repeat it, the best draft is kept."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from training_fixtures import launched, make_target, metrics, write_texts

from longspec.models.draft_files import load_draft
from longspec.train.generations import damage

pytestmark = pytest.mark.slow
EXPERIMENT = "tiny_glide_stage1_sinkpi-slicing"
SHOWN = ("step", "loss", "lr", "grad_norm", "tokens", "epoch")
STEPS, EVERY, ROWS = 6, 2, 3
SHARDED = "+deepspeed.zero_optimization.stage3_param_persistence_threshold=0"
TIMES = ("seconds", "data_seconds", "eval_seconds")


def overrides(work: Path, output: Path) -> list[str]:
    given = [f"model_name_or_path={work}/target", f"data.files={work}/texts.jsonl", f"data.cache_dir={work}/cache"]
    given += [f"output_dir={output}", "deepspeed=zero3", SHARDED]
    return [*given, f"max_steps={STEPS}", "save_steps=2", "learning_rate=5e-3"]


def evaluated(work: Path) -> list[str]:
    """3 rows on 2 ranks, so that one of them has nothing to do in the last round."""
    wanted = {"files": f"{work}/held_out.jsonl", "steps": EVERY, "rows": ROWS, "keep_best": "true"}
    return [f"evaluation.{key}={value}" for key, value in wanted.items()]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One run without evaluation in `plain`, one with it in `evaluated`, under ZeRO-3. (Those of
    tests/e2e/test_equivalence.py evaluate under each stage.)"""
    work = tmp_path_factory.mktemp("work")
    make_target(work / "target")
    write_texts(work / "texts.jsonl")
    write_texts(work / "held_out.jsonl", seed=1)
    launched(EXPERIMENT, *overrides(work, work / "plain"))
    launched(EXPERIMENT, *overrides(work, work / "evaluated"), *evaluated(work))
    return work


def same_draft(one: Path, other: Path) -> bool:
    ours, theirs = load_draft(one), load_draft(other)
    return ours.keys() == theirs.keys() and all(torch.equal(weight, theirs[name]) for name, weight in ours.items())


def test_training_does_not_notice(work: Path) -> None:
    plain, watched = work / "plain", work / "evaluated"
    rows = [[[line[name] for name in SHOWN] for line in metrics(output)] for output in (plain, watched)]
    assert rows[0] == rows[1] and len(rows[0]) == STEPS
    assert same_draft(plain / "checkpoint-last", watched / "checkpoint-last")
    lines = metrics(watched)
    assert [line["step"] for line in lines if "eval_loss" in line] == [2, 4, 6]
    assert not any("eval_loss" in line for line in metrics(plain))
    losses = [line["eval_loss"] for line in lines if "eval_loss" in line]
    assert losses[0] > losses[1] > losses[2], "the draft learns, and the evaluation sees the present one"
    for line in (line for line in lines if "eval_loss" in line):
        assert 1 <= line["eval_acceptance_length"] <= 6
        assert all(0 <= line[f"eval_top1_lag_{lag}"] <= 1 for lag in range(1, 6))


def test_a_resumed_run_repeats_it(work: Path, tmp_path: Path) -> None:
    """Steps 5 and 6 run again from the older checkpoint, with a best draft that may be of step 6."""
    straight, again = work / "evaluated", tmp_path / "again"
    shutil.copytree(straight, again)
    for lost in ("last_ds", "checkpoint-last"):
        shutil.rmtree(again / lost)
    assert "steps 5 … 6" in launched(EXPERIMENT, *overrides(work, again), *evaluated(work), "resume=latest")
    timeless = [
        [{name: value for name, value in line.items() if name not in TIMES} for line in metrics(output)]
        for output in (straight, again)
    ]
    assert timeless[0] == timeless[1]
    assert same_draft(straight / "checkpoint-best", again / "checkpoint-best")


def test_the_best_draft_is_whole_and_says_why(work: Path) -> None:
    """The first of the largest acceptance length; where it is the last step's, it is that checkpoint's draft."""
    output = work / "evaluated"
    best = json.loads((output / "checkpoint-best" / "evaluation.json").read_text())
    lines = [line for line in metrics(output) if "eval_loss" in line]
    chosen = max(lines, key=lambda line: line["eval_acceptance_length"])
    assert best == {name: chosen[name] for name in best} and {"step", "eval_loss", "eval_top1_lag_5"} <= best.keys()
    assert damage(output / "checkpoint-best") is None
    assert (output / "checkpoint-best" / "tokenizer.json").is_file()
    saved = {4: "checkpoint-2last", 6: "checkpoint-last"}
    for step, name in saved.items():
        assert same_draft(output / "checkpoint-best", output / name) == (best["step"] == step)
