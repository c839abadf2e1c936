"""The segments of a micro-batch, on the host and, copied once for all attention calls, on the device.

M is the number of segments, N that of their flattened tokens. An offset is the index of a token in its segment.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from longspec.kernels.shared.device import upload

BLOCK = 4
"""Tokens per block in GLIDE's block pattern: the query at offset i sees the keys at offsets j with
j // BLOCK < i // BLOCK."""


class Keys(NamedTuple):
    """The keys that some query of lagging segments sees: each segment without its last `lag` tokens."""

    rows: Tensor | None
    """Indices of these keys among the N tokens, LongTensor; None for all tokens."""
    bounds: Tensor
    """First key of each segment among `rows`, then the number of rows; int32 [M + 1]."""
    longest: int
    """Largest number of keys of a segment."""


class Segments:
    """M segments of N flattened tokens. In a segment with lag s the query at offset i sees the keys up to i - s."""

    def __init__(self, cu_seqlens: Sequence[int], device: torch.device, lags: Sequence[int] | None = None) -> None:
        """cu_seqlens: first token of each segment, then N. device: where attention runs. lags: per segment, or None
        for 0."""
        # On the host, where shapes are decided; tensors on the device are built when first used.
        self.bounds = list(cu_seqlens)
        self.device = device
        self.lengths = [end - start for start, end in pairwise(self.bounds)]
        self.lags = [0] * len(self.lengths) if lags is None else list(lags)
        if len(self.lags) != len(self.lengths):
            raise ValueError(f"{len(self.lags)} lags for {len(self.lengths)} segments")

    def lagging(self, lags: Sequence[int]) -> "Segments":
        """The same segments with other lags."""
        return Segments(self.bounds, self.device, lags)

    def all_lagging(self, lag: int) -> "Segments":
        """The same segments with one lag."""
        return self.lagging([lag] * len(self.lengths))

    def check(self, tokens: int) -> None:
        """Raise ValueError unless the segments cover exactly `tokens` tokens."""
        if self.bounds[0] != 0 or self.bounds[-1] != tokens:
            raise ValueError(
                f"cu_seqlens must run from 0 to {tokens} tokens, not from {self.bounds[0]} to {self.bounds[-1]}"
            )

    @cached_property
    def longest(self) -> int:
        """Largest number of tokens of a segment."""
        return max(self.lengths)

    @cached_property
    def query_bounds(self) -> Tensor:
        """First token of each segment, then N; int32 [M + 1] on the device."""
        return upload(torch.tensor(self.bounds, dtype=torch.int32), self.device)

    @cached_property
    def offsets(self) -> Tensor:
        """Offset of each token in its segment, LongTensor [N] on the device."""
        return upload(self._host_offsets(), self.device)

    def newest_keys(self, lags: Tensor | None) -> Tensor:
        """Index of the newest key that each query sees, among the N tokens, LongTensor [N] on the device; -1 for none.
        lags: as in `token_lags`."""
        offsets, token_lags = self._host_offsets(), self.token_lags(lags)
        newest = torch.arange(len(offsets)) - token_lags
        return upload(newest.where(offsets >= token_lags, -1), self.device)

    def token_lags(self, lags: Tensor | None) -> Tensor:
        """The lag of each token, LongTensor [N] on the host. lags: LongTensor [M], those of the segments; None for the
        block pattern, where the newest visible key is the last of the previous block."""
        return self._host_offsets() % BLOCK + 1 if lags is None else self._by_token(lags)

    @cached_property
    def keys(self) -> Keys:
        """The visible keys, on the device."""
        counts = [max(0, length - lag) for length, lag in zip(self.lengths, self.lags, strict=True)]
        # Without lags, all keys are visible, and no copy is needed.
        if counts == self.lengths:
            return Keys(None, self.query_bounds, self.longest)

        bounds = torch.tensor([0, *counts]).cumsum(0, dtype=torch.int32)
        rows = (self._host_offsets() < self._by_token(counts)).nonzero().squeeze(1)
        return Keys(upload(rows, self.device), upload(bounds, self.device), max(counts))

    def _host_offsets(self) -> Tensor:
        return torch.arange(self.bounds[-1]) - self._by_token(self.bounds[:-1])

    def _by_token(self, values: Sequence[int] | Tensor) -> Tensor:
        """The value of each segment at each of its tokens, LongTensor [N] on the host."""
        return torch.as_tensor(values).repeat_interleave(torch.tensor(self.lengths))
