"""The training benchmark: FLOP counts by hand, and a run on a tiny shape."""

import pytest

from benchmarks.shapes import SHAPES
from benchmarks.training_flops import training_flops


def test_flops_of_llama_3_8b_at_32k_are_those_worked_out_by_hand() -> None:
    """One segment of T = 32768 tokens, layers of 218.1M weights, and 4 · 32 · 128 operations per pair of tokens."""
    tokens, pair = 32768, 4 * 32 * 128
    layer = 4096 * (4096 + 2 * 1024) + 4096 * 4096 + 3 * 4096 * 14336
    causal = pair * tokens * (tokens + 1) / 2
    window = pair * (512 * 513 / 2 + (tokens - 512) * 513)
    draft, logits = 2 * tokens * (layer + 2 * 4096 * 4096), 2 * tokens * 128256 * 4096
    ends_early = training_flops(SHAPES["llama3-8b"], [tokens], tokens, reads_target=False)
    assert ends_early.target == 31 * (2 * tokens * layer + causal) + 2 * tokens * 2 * 4096 * 1024
    assert ends_early.draft_forward == draft + window + causal
    assert ends_early.draft_backward == 2 * draft + 2 * window + causal
    assert ends_early.loss == 2 * logits
    assert ends_early.total == pytest.approx(853e12, rel=0.01)
    whole = training_flops(SHAPES["llama3-8b"], [tokens], tokens, reads_target=True)
    assert whole.target == 32 * (2 * tokens * layer + causal) and whole.loss == 3 * logits
