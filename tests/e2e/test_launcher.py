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
    deepspeed_launch,
    launch,
    launched,
    make_target,
    metrics,
    plain_training,
    write_answers,
    write_texts,
)

from longspec.models.draft_files import load_draft
from longspec.train.config import load_config

STAGES = [f"tiny_glide_stage{number}_sinkpi-slicing" for number in (1, 2, 3)]
SHARDED = "+deepspeed.zero_optimization.stage3_param_persistence_threshold=0"  # or tiny weights stay whole
STEPS = 4


@pytest.mark.parametrize("start", [launch, pytest.param(deepspeed_launch, marks=pytest.mark.slow)])
def test_two_ranks_train_as_one_plain_loop_does(tmp_path: Path, start: Callable[..., Any]) -> None:
    """Ranks, accumulation, uneven token counts, ZeRO-1, clipping and schedule change nothing but rounding."""
    target, data = make_target(tmp_path / "target"), write_texts(tmp_path / "data.jsonl")
    overrides = [f"model_name_or_path={target}", f"data.files={data}", f"data.cache_dir={tmp_path}/cache"]
    overrides += [f"output_dir={tmp_path}/out", "variant=base", "max_steps=3", "max_grad_norm=0.3", "data.pack=false"]
    config = load_config(["-cp", str(ROOT / "conf/exp"), "-cn", STAGES[0], *overrides])
    assert config is not None
    losses, weights = plain_training(config, steps=3, ranks=2)
    result = start(STAGES[0], *overrides)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    logged = metrics(tmp_path / "out")
    assert [line["step"] for line in logged] == [1, 2, 3]
    assert [line["loss"] for line in logged] == pytest.approx(losses, rel=1e-5)
    assert min(line["grad_norm"] for line in logged) > 0.3, "the clipping must be at work"
    draft = load_draft(tmp_path / "out" / "checkpoint-last")
    torch.testing.assert_close(draft, dict(weights), rtol=1e-4, atol=1e-6)


def refusal(*arguments: str) -> str:
    """The one line that a launch says before it ends with exit code 2."""
    result = launch(*arguments)
    errors = [line for line in result.stderr.splitlines() if line.startswith("error:")]
    assert result.returncode == 2 and len(errors) == 1, result.stderr[-3000:]
    assert "Traceback" not in result.stderr
    return errors[0]


def test_a_mistake_on_the_launch_line_is_one_line_of_all_ranks() -> None:
    """The rank that knows the message must say it before any rank ends, for then the launcher ends them all."""
    assert "learning_rte" in refusal(STAGES[0], "learning_rte=1")


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


def overrides(work: Path, stage: int) -> list[str]:
    data = work / ("texts.jsonl" if stage < 3 else "answers.jsonl")
    given = ["model=qwen3", "model.gradient_checkpointing=true", "loss=mixed", "log_target_loss=true"]
    given += [f"model_name_or_path={work}/target", f"data.files={data}"]
    given += [f"data.cache_dir={work}/cache", f"output_dir={work}/{stage}", f"max_steps={STEPS}", "save_steps=2"]
    if stage > 1:
        given += [f"draft_model_name_or_path={work}/{stage - 1}/checkpoint-last/draft_model_weights.pth", SHARDED]
    return given


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
@pytest.mark.parametrize("stage", [1])  # under ZeRO-3: tests/e2e/test_survival.py
def test_resumed_run_ends_as_the_straight_one(curriculum: Path, stage: int, tmp_path: Path) -> None:
    """The newest checkpoint is lost, so steps 3 and 4 run again from the older one: same losses, same bits.

    The draft of the stage before may be gone by then.
    """
    straight, again = curriculum / str(stage), tmp_path / "again"
    shutil.copytree(straight, again)
    shutil.rmtree(again / "last_ds")
    shutil.rmtree(again / "checkpoint-last")
    changes = [f"output_dir={again}", "resume=latest", "draft_model_name_or_path=/gone.pth"]
    said = launched(STAGES[stage - 1], *overrides(curriculum, stage), *changes)
    assert "going back to the older checkpoint" in said and f"steps 3 … {STEPS}" in said
    shown = ("step", "loss", "lr", "grad_norm", "tokens", "epoch")
    rows = [[[line[name] for name in shown] for line in metrics(folder)] for folder in (straight, again)]
    assert rows[0] == rows[1]
    drafts = [load_draft(folder / "checkpoint-last") for folder in (straight, again)]
    assert distance(*drafts) == 0


@pytest.mark.slow
def test_going_on_after_the_last_step_changes_nothing(curriculum: Path) -> None:
    before = (curriculum / "1" / "metrics.jsonl").read_bytes()
    assert "nothing left to do" in launched(STAGES[0], *overrides(curriculum, 1), "resume=latest")
    assert (curriculum / "1" / "metrics.jsonl").read_bytes() == before
