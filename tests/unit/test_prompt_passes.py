"""The captured passes over chunks of prompts: sizes, work per pass, and a capture that runs out of memory."""

import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from longspec.inference.engine import capture as capture_module
from longspec.inference.engine.prefill import SIZES, PromptReader
from longspec.kernels.triton.flash_attention import FlashAttention

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


@pytest.mark.parametrize(("capacity", "largest"), [(512, 64), (512, 1024), (512, 5000), (256, 1), (9, 9)])
@pytest.mark.usefixtures("failures")
def test_no_pass_goes_past_the_last_slot(capacity: int, largest: int) -> None:
    """Not even while it is captured; the chunk may be longer than a row."""
    prompts, farthest = reader(capacity, largest)
    prompts.capture()
    longest = min(largest, capacity)
    assert 0 < len(prompts.sizes) <= SIZES and prompts.sizes[-1] > longest * (1 - 1 / SIZES)
    assert len(farthest) == len(prompts.sizes) and max(farthest) < capacity


@pytest.mark.usefixtures("failures")
def test_a_pass_computes_the_end_of_its_slots_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    ends: list[Tensor] = []

    def flash(q: Tensor, *_: Tensor, cache_seqlens: Tensor, **__: Any) -> Tensor:
        ends.append(cache_seqlens)
        return q

    def target(tokens: Tensor, positions: Tensor, cache: Any, slots: Tensor, attend: Any) -> Tensor:
        q = torch.zeros(1, 1, tokens.shape[1], 4)
        for _ in range(3):
            attend(q, q, q, 1.0)
        return q[0]

    monkeypatch.setitem(sys.modules, "fa3_fwd_interface", SimpleNamespace(flash_attn_with_kvcache=flash))
    prompts, _ = reader(256, 64)
    runner: Any = prompts.runner
    runner.attention, runner.target = FlashAttention(Any), target  # type: ignore[arg-type]
    prompts.capture()
    ends.clear()
    for start, count in ((5, 9), (14, 33)):
        prompts.read(slice(0, 1), torch.zeros(1, count, dtype=torch.long), start, [start + count])
    assert [int(end) for end in ends] == [5 + 16] * 3 + [14 + 40] * 3
    assert len({id(end) for end in ends}) == 2


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
