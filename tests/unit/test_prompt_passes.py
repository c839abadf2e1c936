"""The captured passes over chunks of prompts: sizes, work per pass, and a capture that runs out of memory."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longspec.inference.engine import capture as capture_module
from longspec.inference.engine.prefill import PromptReader

CPU = torch.device("cpu")


@pytest.fixture
def failures(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """Errors that the next captures raise. Other captures return the call itself."""
    errors: list[Exception] = []

    def captured(call: Any, *_: Any) -> Any:
        if errors:
            raise errors.pop()
        return call

    monkeypatch.setattr(capture_module, "CapturedPass", captured)
    return errors


def reader(capacity: int, largest: int) -> tuple[PromptReader, list[int]]:
    """A reader on a fake device that captures, and the largest position of each of its passes."""
    farthest: list[int] = []

    def target(tokens: Tensor, positions: Tensor, *_: Any) -> Tensor:
        farthest.append(int(positions.max()))
        return torch.zeros(1, tokens.shape[1], 4)

    attention = SimpleNamespace(chunk=lambda rows, ends: "attend")
    runner: Any = SimpleNamespace(capturable=True, attention=attention, target=target)
    cache: Any = SimpleNamespace(
        keys=torch.zeros(1, 1, 1, capacity, 4), lengths=torch.zeros(1, dtype=torch.int32), select=lambda rows: None
    )
    return PromptReader(runner, cache, largest), farthest


def test_a_capture_without_memory_is_tried_again(failures: list[Exception]) -> None:
    """As for rounds: the blocks that the first, uncaptured run left cached are freed."""
    prompts, _ = reader(256, 64)
    failures.append(torch.OutOfMemoryError("out of memory"))
    prompts.capture()
    assert set(prompts._passes) == set(prompts.sizes)
    engine: Any = SimpleNamespace(root=torch.zeros(2), round=lambda active: "played")
    failures.append(torch.OutOfMemoryError("out of memory"))
    assert capture_module.CapturedRound(engine)(torch.ones(2, dtype=torch.bool)) == "played"
    failures += [torch.OutOfMemoryError("out of memory")] * 2
    with pytest.raises(torch.OutOfMemoryError):
        capture_module.capture_pass(lambda: None, CPU)
