"""Reads chunks of prompts into rows of a server's cache. Where FlashAttention-3 runs, a chunk is one CUDA graph."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from longspec.inference.cache import TargetCache
from longspec.inference.capture import CapturedPass, capture_pass
from longspec.inference.runner import Runner
from longspec.kernels.shared.device import upload

SIZES = 8
"""Number of captured sizes: a chunk is padded by less than an eighth of the largest one."""


class PromptReader:
    """Passes over some tokens of one row, which follow the tokens that the row holds."""

    def __init__(self, runner: Runner, cache: TargetCache, largest: int) -> None:
        """largest: most tokens of a captured pass."""
        self.runner = runner
        self.cache = cache
        capacity = cache.keys.shape[3]
        step = -(-min(largest, capacity) // SIZES)
        # A pass of more than `capacity` tokens would go past the row's slots and the rotary table.
        self.sizes = range(step, capacity + 1, step)[:SIZES]
        device = cache.keys.device
        # Captured passes read these tensors, so they serve every row and position.
        self.tokens = torch.zeros(1, self.sizes[-1], dtype=torch.long, device=device)
        self.span = torch.zeros(3, 1, dtype=torch.int32, device=device)
        self.row, self.start, self.count = self.span
        """int32 [1] each: row, position of the first token, number of tokens."""
        self._passes: dict[int, CapturedPass[Tensor]] = {}
        """The captured pass of each size."""

    def capture(self) -> None:
        """Capture a pass of each size, if the device can. The cache must be empty."""
        if not self.runner.capturable or self.runner.attention.chunk(self.row, self.start) is None:
            return
        for size in reversed(self.sizes):  # the largest first: the others fit into its memory
            chunk = partial(self._chunk, size)
            chunk()  # compiles the kernels; a chunk of no tokens stores nothing
            self._passes[size] = capture_pass(chunk, self.tokens.device)

    def read(self, row: int, tokens: Tensor, start: int) -> Tensor:
        """Read tokens, LongTensor [1, n], at positions start, start + 1, ... of a row, whose length becomes start + n.

        Returns the hidden state [1, 1, hidden] at the last one; the next call may overwrite it.
        """
        count = tokens.shape[1]
        room = self.cache.keys.shape[3] - start
        size = min((size for size in self._passes if count <= size <= room), default=None)
        if size is None:
            hidden = self._read_eagerly(row, tokens, start)[:, -1:]
        else:
            self.tokens[:, :count] = tokens
            self.span.copy_(upload(torch.tensor([[row], [start], [count]], dtype=torch.int32), self.span.device))
            hidden = self._passes[size]()
        self.cache.lengths[row] = start + count
        return hidden

    def read_all(self, row: int, tokens: Tensor, start: int) -> Tensor:
        """As `read`, with the hidden states [1, n, hidden] at all tokens."""
        hidden = self._read_eagerly(row, tokens, start)
        self.cache.lengths[row] = start + tokens.shape[1]
        return hidden

    def _chunk(self, size: int) -> Tensor:
        """A pass over `tokens`, padded to `size` tokens."""
        steps = torch.arange(size, device=self.tokens.device)
        # Padding is not stored, and no token before it sees it.
        positions = (self.start + steps)[None]
        slots = torch.where(steps < self.count, positions, -1)
        cache = self.cache.select(self.row)
        # Within the pass, so that its graph computes the end for all layers.
        attend = self.runner.attention.chunk(self.row, self.start + size)
        assert attend is not None
        hidden = self.runner.target(self.tokens[:, :size], positions, cache, slots, attend)
        last = (self.count - 1).clamp(min=0).long()
        return hidden.index_select(1, last)

    def _read_eagerly(self, row: int, tokens: Tensor, start: int) -> Tensor:
        end = start + tokens.shape[1]
        positions = torch.arange(start, end, device=tokens.device)[None]

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            return self.runner.attention.prefill(q, k[:, :, :end], v[:, :, :end], scale)

        cache = self.cache.narrow(slice(row, row + 1))
        return self.runner.target(tokens, positions, cache, positions, attend)
