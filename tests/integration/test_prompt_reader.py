"""Captured passes over chunks of a prompt store and return what eager passes do, for any row, start and length."""

from pathlib import Path

import pytest
import torch
from pairs import make_pair

from longspec.inference.cache import TargetCache
from longspec.inference.engine.prefill import PromptReader
from longspec.inference.fused_runner import make_runner

pytestmark = pytest.mark.gpu
CAPACITY, LARGEST = 512, 64
CHUNKS = {2: (64, 40, 3, 1, 64), 0: (1,), 1: (57, *[64] * 7)}
"""Lengths of the chunks by row. The last one of row 1 ends 7 slots before the row does: padding would go past it."""


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
    assert len(captured._passes) == 8
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
