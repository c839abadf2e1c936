"""What a micro-batch's tokens are told about where they are: position ids, and lags behind the target's keys.

Everything random here comes from a generator that is a function of (seed, micro-step, rank), so a resumed run draws
what the uninterrupted one would have drawn.
"""

import numpy as np
import torch
from torch import Tensor

VARIANTS = ("base", "sinkpi-slicing")
SINKS = 4
BLOCK_LAGS = 4
"""The largest lag of the base variant: its blocks of 4 make the query at i lag by i % 4 + 1."""
SHORT = 1200
"""Segments of up to this many tokens get anchor-offset positions."""
HEADROOM = 1000
"""Positions at the end of the target's range that no offset reaches."""


def micro_step_generator(seed: int, micro_step: int, rank: int) -> torch.Generator:
    """A CPU generator whose stream depends on all three numbers, each >= 0, and on nothing else."""
    state = np.random.SeedSequence([seed, micro_step, rank]).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state[0]))


def contiguous_positions(cu_seqlens: Tensor, shape: tuple[int, int]) -> Tensor:
    """Position ids, Long `shape` = [B, T]: 0, 1, 2, … from the start of each segment of `cu_seqlens`, int [S + 1]."""
    lengths = cu_seqlens.diff().long()
    starts = cu_seqlens[:-1].long().repeat_interleave(lengths)
    return (torch.arange(len(starts)) - starts).view(shape)


def anchor_offset_positions(
    cu_seqlens: Tensor,
    shape: tuple[int, int],
    max_offset: int,
    context_window: int,
    generator: torch.Generator,
) -> Tensor:
    """Position ids, Long `shape` = [B, T], with a jump after the attention sinks of each short segment.

    In a segment of at most 1200 tokens tokens 0..3 keep positions 0..3 and token j >= 4 gets o + j, with o uniform in
    0 … max(0, min(max_offset, context_window - 1000) - length). Longer segments stay contiguous. `context_window` is
    how many positions the target serves: max_position_embeddings, or more where its rotary scaling stretches it.
    """
    lengths = cu_seqlens.diff().long()
    largest = (min(max_offset, context_window - HEADROOM) - lengths).clamp(min=0)
    largest[lengths > SHORT] = 0
    uniform = torch.rand(len(lengths), generator=generator, dtype=torch.float64)
    offsets = (uniform * (largest + 1)).long()
    positions = contiguous_positions(cu_seqlens, shape)
    return positions + torch.where(positions < SINKS, 0, offsets.repeat_interleave(lengths).view(shape))


def variant_positions(
    variant: str,
    cu_seqlens: Tensor,
    shape: tuple[int, int],
    max_offset: int,
    context_window: int,
    generator: torch.Generator,
) -> Tensor:
    """Position ids, Long `shape` = [B, T], as training with `variant` has them; see the two functions above."""
    if variant == "base":
        return contiguous_positions(cu_seqlens, shape)
    return anchor_offset_positions(cu_seqlens, shape, max_offset, context_window, generator)


def random_lags(segments: int, depth: int, generator: torch.Generator) -> Tensor:
    """One lag for each segment, Long [segments], uniform in 1 … depth: how stale the target's keys are."""
    return torch.randint(1, depth + 1, (segments,), generator=generator)
