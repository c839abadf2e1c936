"""Where the segments of a micro-batch lie, on the host and, copied once for all attention calls, on the device."""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longspec.kernels.shared.device import upload

BLOCK = 4
"""Tokens of a block in GLIDE's block pattern: the query at offset i sees the keys at offsets j with
j // BLOCK < i // BLOCK."""


class Keys(NamedTuple):
    """What the queries of lagging segments see at most: each segment without its last `lag` keys."""

    rows: Tensor | None
    """LongTensor: which of the N tokens these are; None for all."""
    bounds: Tensor
    """int32 [S + 1]: where each segment's begin among `rows`."""
    longest: int


class Segments:
    """S segments of N flattened tokens. The query at offset i of a segment that lags by s sees keys up to i - s."""

    def __init__(self, cu_seqlens: Sequence[int], device: torch.device, lags: Sequence[int] | None = None) -> None:
        """cu_seqlens: S + 1 borders from 0 to N; device: where attention runs; lags: one a segment, None for 0."""
        self.bounds, self.device = list(cu_seqlens), device
        self.lengths = [end - start for start, end in pairwise(self.bounds)]
        self.lags = [0] * len(self.lengths) if lags is None else list(lags)
        if len(self.lags) != len(self.lengths):
            raise ValueError(f"{len(self.lags)} lags for {len(self.lengths)} segments")

    def lagging(self, lags: Sequence[int]) -> "Segments":
        """The same segments with other lags."""
        return Segments(self.bounds, self.device, lags)

    def check(self, tokens: int) -> None:
        """Raise ValueError unless these are segments of so many tokens."""
        if self.bounds[0] != 0 or self.bounds[-1] != tokens:
            raise ValueError(
                f"cu_seqlens must run from 0 to {tokens} tokens, not from {self.bounds[0]} to {self.bounds[-1]}"
            )

    @cached_property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def common_lag(self) -> int | None:
        """The lag of all segments, None if they have several."""
        return self.lags[0] if len(set(self.lags)) == 1 else None

    @cached_property
    def query_bounds(self) -> Tensor:
        """int32 [S + 1] on the device."""
        return upload(torch.tensor(self.bounds, dtype=torch.int32), self.device)

    @cached_property
    def offsets(self) -> Tensor:
        """LongTensor [N] on the device: each token's place in its segment."""
        return upload(torch.cat([torch.arange(length) for length in self.lengths]), self.device)

    def newest_keys(self, blocks: bool = False) -> Tensor:
        """LongTensor [N] on the device: the newest token whose key a query sees, among the N; -1 where it sees none.

        blocks: under the block pattern, where lags do not count.
        """
        offsets = torch.cat([torch.arange(length) for length in self.lengths])
        lags = offsets % BLOCK + 1 if blocks else torch.tensor(self.lags).repeat_interleave(torch.tensor(self.lengths))
        newest = torch.arange(len(offsets)) - lags
        return upload(newest.where(offsets >= lags, -1), self.device)

    @cached_property
    def keys(self) -> Keys:
        """On the device."""
        counts = [max(0, length - lag) for length, lag in zip(self.lengths, self.lags, strict=True)]
        if counts == self.lengths:
            return Keys(None, self.query_bounds, self.longest)
        bounds = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
        rows = [torch.arange(start, start + count) for start, count in zip(self.bounds, counts, strict=False)]
        return Keys(upload(torch.cat(rows), self.device), upload(bounds, self.device), max(counts))
