"""Position ids and lags of a micro-batch, as the two training variants define them.

All random numbers come from a generator that is a function of (seed, micro-step, rank). A resumed run therefore draws
the same numbers as an uninterrupted one.
"""

from typing import Literal

import numpy as np
import torch
from torch import Tensor

Variant = Literal["base", "sinkpi-slicing"]
SINKS = 4
"""Tokens at the start of a segment that keep positions 0 to 3 and serve as attention sinks."""
BLOCK_LAGS = 4
"""Largest lag of the base variant. In its blocks of 4 tokens the query at i lags by i % 4 + 1."""
MAX_OFFSET_TOKENS = 1200
"""Longest segment in tokens that gets anchor-offset positions."""
RESERVED_POSITIONS = 1000
"""Positions at the end of the target's range that offsets leave unused."""


def micro_step_generator(seed: int, micro_step: int, rank: int) -> torch.Generator:
    """A CPU generator whose stream depends only on these three numbers, each >= 0."""
    # Seeds that differ by one give independent streams, unlike sums of the three numbers.
    state = np.random.SeedSequence([seed, micro_step, rank]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))


def contiguous_positions(cu_seqlens: Tensor, shape: tuple[int, int]) -> Tensor:
    """Position ids that count 0, 1, 2, … in each segment. LongTensor of `shape` = [B, T].

    cu_seqlens: int32 [M + 1], the borders of M segments in the flattened B·T tokens.
    """
    lengths = cu_seqlens.diff().long()
    starts = cu_seqlens[:-1].long().repeat_interleave(lengths)
    return (torch.arange(len(starts)) - starts).view(shape)


def anchor_offset_positions(
    cu_seqlens: Tensor, shape: tuple[int, int], max_offset: int, max_positions: int, generator: torch.Generator
) -> Tensor:
    """Position ids that jump after the attention sinks of each short segment. LongTensor of `shape` = [B, T].

    In a segment of n <= 1200 tokens, tokens 0 to 3 keep positions 0 to 3 and token j >= 4 gets position o + j, with o
    uniform in 0 … max(0, min(max_offset, max_positions - 1000) - n). Longer segments stay contiguous. (LongSpec, arXiv
    2502.17421: anchor-offset indices, which train distant positions on short text.)

    max_positions: the target's context length, including the effect of rotary scaling.
    """
    lengths = cu_seqlens.diff().long()

    # A segment with offset o occupies positions up to o + n - 1, within the range of the target.
    largest = (min(max_offset, max_positions - RESERVED_POSITIONS) - lengths).clamp(min=0)
    # A long segment already covers distant positions.
    largest[lengths > MAX_OFFSET_TOKENS] = 0

    uniform = torch.rand(len(lengths), generator=generator, dtype=torch.float64)
    # Uniform in 0 … largest, drawn in fp64 so that all offsets are equally likely.
    offsets = (uniform * (largest + 1)).long()
    token_offsets = offsets.repeat_interleave(lengths).view(shape)

    positions = contiguous_positions(cu_seqlens, shape)
    return positions + torch.where(positions < SINKS, 0, token_offsets)


def random_lags(segments: int, depth: int, generator: torch.Generator) -> Tensor:
    """One lag per segment, LongTensor [segments], uniform in 1 … depth.

    In decoding, the query that proposes level d of a tree reads a target cache that ends d tokens before it. Training
    on lags 1 … depth covers all levels of a tree of that depth. (LongSpec, arXiv 2502.17421: flash noisy training.)
    """
    return torch.randint(1, depth + 1, (segments,), generator=generator)
