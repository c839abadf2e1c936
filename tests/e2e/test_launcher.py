"""Training on two CPU ranks: losses, saved files and resuming. Only the first test uses DeepSpeed's launcher."""

import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from training_fixtures import (
    ROOT,
    SHARDED,
    TINY,
    deepspeed_launch,
    equal_drafts,
    error_line,
    launch,
    launched,
    lose_newest,
    make_target,
    metrics,
    overrides_of,
    plain_training,
    timeless,
    tiny_config,
    write_answers,
    write_texts,
)

from longspec.models.draft_files import load_draft

STAGES = [f"tiny_glide_stage{number}_sinkpi-slicing" for number in (1, 2, 3)]
STEPS = 4


@pytest.mark.parametrize("start", [launch, pytest.param(deepspeed_launch, marks=pytest.mark.slow)])
def test_two_ranks_train_as_one_plain_loop_does(work: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    """Ranks, accumulation, uneven token counts, ZeRO-1, clipping and schedule change nothing but rounding."""
    more = ["variant=base", "max_steps=3", "max_grad_norm=0.3", "data.pack=false"]
    overrides = overrides_of(work, tmp_path / "out", *more)
    losses, weights = plain_training(tiny_config(*overrides), steps=3, ranks=2)
    result = start(TINY, *overrides)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    logged = metrics(tmp_path / "out")
    assert [line["step"] for line in logged] == [1, 2, 3]
    assert [line["loss"] for line in logged] == pytest.approx(losses, rel=1e-5)
    assert min(line["grad_norm"] for line in logged) > 0.3, "the clipping must be at work"
    draft = load_draft(tmp_path / "out" / "checkpoint-last")
    torch.testing.assert_close(draft, dict(weights), rtol=1e-4, atol=1e-6)


def test_a_mistake_on_the_launch_line_is_one_line_of_all_ranks() -> None:
    """The rank that knows the message must say it before any rank ends, for then the launcher ends them all."""
    assert "learning_rte" in error_line(launch(TINY, "learning_rte=1"))


@pytest.fixture(scope="module")
def curriculum(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All three stages, each from the draft of the one before: folders 1, 2, 3 next to target and data.

    With tied embeddings, recomputation and the mixed loss. Other tests train Llama and Qwen2 (`test_equivalence.py`,
    `test_tensor_parallel.py`).
    """
    work = tmp_path_factory.mktemp("curriculum")
    make_target(work / "target", "qwen3", tie_word_embeddings=True)
    write_texts(work / "texts.jsonl")
    write_answers(work / "answers.jsonl")
    (work / "before.safetensors").write_bytes((work / "target" / "model.safetensors").read_bytes())
    for stage in (1, 2, 3):
        launched(STAGES[stage - 1], *overrides(work, stage))
    return work


def overrides(work: Path, stage: int, *more: str) -> list[str]:
    given = ["model=qwen3", "model.gradient_checkpointing=true", "loss=mixed", "log_target_loss=true"]
    given += [f"max_steps={STEPS}", "save_steps=2"]
    if stage > 1:
        given += [f"draft_model_name_or_path={work}/{stage - 1}/checkpoint-last/draft_model_weights.pth", *SHARDED]
    if stage == 3:
        given.append(f"data.files={work}/answers.jsonl")
    return overrides_of(work, work / str(stage), *given, *more)


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).detach().abs().max()) for name in one)


@pytest.mark.slow
def test_each_stage_starts_from_the_draft_of_the_one_before(curriculum: Path) -> None:
    """AdamW moves a weight by about the learning rate a step; a fresh draft would be 0.1 away."""
    first, second, third = (load_draft(curriculum / str(stage) / "checkpoint-last") for stage in (1, 2, 3))
    for before, after in ((first, second), (second, third)):
        assert 0 < distance(before, after) < 2 * STEPS * 5e-5
    for stage in (1, 2, 3):
        lines = metrics(curriculum / str(stage))
        assert len(lines) == STEPS and all(math.isfinite(line["loss"]) for line in lines)
        assert all(line["loss"] == pytest.approx((line["ce"] + line["kl"]) / 2, rel=1e-5) for line in lines)
        assert all("target_loss" in line for line in lines)


@pytest.mark.slow
def test_extracted_draft_is_the_engines_and_the_target_is_untouched(curriculum: Path) -> None:
    """checkpoint-last = gathered after loading = DeepSpeed's consolidation = the script's two forms, bit for bit."""
    before = load_file(curriculum / "before.safetensors")
    assert distance(before, load_file(curriculum / "target" / "model.safetensors")) == 0
    launched(STAGES[2], *overrides(curriculum, 3), script="tests/consolidate_run.py")
    output = curriculum / "3"
    draft = load_draft(output / "checkpoint-last")
    assert distance(draft, torch.load(output / "gathered.pt")) == 0
    whole = torch.load(output / "consolidated.pt")
    assert distance(draft, load_draft(output / "consolidated.pt")) == 0
    assert distance(before, {name: whole[name] for name in before}) == 0
    script = [sys.executable, "scripts/extract_draft.py", str(output / "last_ds")]
    for form in ([f"{output}/draft.pth"], [f"{output}/hub", "--hf"]):
        subprocess.run([*script, *form], cwd=ROOT, check=True, capture_output=True)
        assert distance(draft, load_draft(form[0])) == 0


@pytest.mark.slow
def test_resumed_run_ends_as_the_straight_one(curriculum: Path, tmp_path: Path) -> None:
    """The newest checkpoint is lost, so steps 3 and 4 run again from the older one: same losses, same bits.

    The draft of the stage before may be gone by then. After the last step nothing changes. (Under ZeRO-3:
    tests/e2e/test_survival.py.)
    """
    straight, again = curriculum / "1", tmp_path / "again"
    shutil.copytree(straight, again)
    lose_newest(again)
    changes = [f"output_dir={again}", "resume=latest", "draft_model_name_or_path=/gone.pth"]
    said = launched(STAGES[0], *overrides(curriculum, 1, *changes))
    assert "going back to the older checkpoint" in said and f"steps 3 … {STEPS}" in said
    assert timeless(straight) == timeless(again)
    assert equal_drafts(straight / "checkpoint-last", again / "checkpoint-last")
    before = (again / "metrics.jsonl").read_bytes()
    assert "nothing left to do" in launched(STAGES[0], *overrides(curriculum, 1, *changes))
    assert (again / "metrics.jsonl").read_bytes() == before
