"""Captured passes over prompts and captured starts of drafters leave what eager ones do, for any row and length."""

from pathlib import Path

import pytest
import torch
from pairs import make_pair

from longspec.inference.cache import TargetCache
from longspec.inference.engine import capture, prefill
from longspec.inference.engine.batch import Batch
from longspec.inference.engine.prefill import PromptReader
from longspec.inference.fused_runner import make_runner
from longspec.inference.methods import AUTO, Drafting

PROMPTS = {2: 70, 0: 9, 1: 1}
"""Number of prompt tokens by row. Row 2 starts twice, the second time with fewer tokens."""
CAPACITY, LARGEST = 512, 64
CHUNKS = {2: (64, 40, 3, 1, 64), 0: (1,), 1: (57, *[64] * 7)}
"""Lengths of the chunks by row. The last one of row 1 ends 7 slots before the row does: padding would go past it."""


@torch.no_grad()
@pytest.mark.parametrize(("method", "listed"), [("tree", False), ("lookup", False), (AUTO, True)])
def test_captured_starts_equal_eager_ones(
    method: str, listed: bool, device: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other rows stay as they were."""
    if device == "cpu":  # the static tensors are the same without a graph
        monkeypatch.setattr(prefill, "capture_pass", lambda start, device: start)
    model = make_pair(tmp_path, dtype=torch.bfloat16, hidden_size=128).to(device)
    if listed:
        model.draft_model.set_vocabulary(torch.arange(1, model.config.vocab_size, 2, device=device))
    runner = make_runner(model, "auto", compiled=device == "cuda")
    batches = [Batch(runner, Drafting(method, (2, 3), 2), 3, 512) for _ in range(2)]
    captured, eager = (batch.starter for batch in batches)
    captured.capture()
    generator = torch.Generator().manual_seed(0)
    for row, count in [(2, 90), *PROMPTS.items()]:
        prompt = torch.randint(0, model.config.vocab_size, (1, count), generator=generator).to(device)
        for starter in (captured, eager):
            starter.start(slice(row, row + 1), prompt, [count])
    states = [batch.drafter.row_states() for batch in batches]
    assert states[0] and any(state.any() for state in states[0])
    torch.testing.assert_close(*states, rtol=0, atol=0)


@pytest.mark.gpu
@torch.no_grad()
def test_captured_chunks_equal_eager_ones(tmp_path: Path) -> None:
    model = make_pair(tmp_path, dtype=torch.bfloat16, hidden_size=128, initializer_range=0.1).cuda()
    runner = make_runner(model, "auto", compiled=True)
    if runner.attention.name != "flash":
        pytest.skip("needs FlashAttention-3")
    runner.prepare(CAPACITY)
    captured, eager = (
        PromptReader(runner, TargetCache(runner.config, 3, CAPACITY, runner.dtype, runner.device), LARGEST)
        for _ in range(2)
    )
    captured.capture()
    assert not captured.cache.keys.any(), "warming up stored tokens"
    generator = torch.Generator().manual_seed(0)
    for row, counts in CHUNKS.items():
        start = 0
        for count in counts:
            tokens = torch.randint(0, 61, (1, count), generator=generator).cuda()
            hidden = [reader.read(slice(row, row + 1), tokens, start, [start + count]) for reader in (captured, eager)]
            start += count
            torch.testing.assert_close(*hidden, atol=5e-2, rtol=5e-2)
            assert captured.cache.lengths[row] == start
    for store, expected in ((captured.cache.keys, eager.cache.keys), (captured.cache.values, eager.cache.values)):
        torch.testing.assert_close(store, expected, atol=5e-2, rtol=5e-2)
        for row, counts in CHUNKS.items():
            assert not store[:, row, :, sum(counts) :].any(), "padding was stored"


@pytest.mark.parametrize("failures", [1, 2])
def test_a_capture_without_memory_is_tried_once_more(failures: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks that the first, uncaptured run left cached are freed in between."""
    errors = [torch.OutOfMemoryError("out of memory")] * failures

    def captured(call: object, device: torch.device) -> object:
        if errors:
            raise errors.pop()
        return call

    monkeypatch.setattr(capture, "CapturedPass", captured)
    if failures == 1:
        assert capture.capture_pass(print, torch.device("cpu")) is print
    else:
        with pytest.raises(torch.OutOfMemoryError):
            capture.capture_pass(print, torch.device("cpu"))
