"""Training on two CPU ranks, as one plain loop trains. Only the first test uses DeepSpeed's launcher."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training_fixtures import (
    TINY,
    deepspeed_launch,
    error_line,
    launch,
    metrics,
    overrides_of,
    plain_training,
    tiny_config,
)

from longspec.models.draft_files import load_draft


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
