"""Starts the drafter of rows on their prompts. Where rounds are CUDA graphs, so is this."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from longspec.inference.drafting.proposal import DraftState
from longspec.inference.engine.capture import CapturedPass, capture_pass
from longspec.inference.sampling import Sampler
from longspec.kernels.shared.device import upload


class DraftStarter:
    """Starts take dozens of small kernels, whose launches would take longer than a round of a small target."""

    def __init__(self, drafter: DraftState, rows: int, capacity: int, sampler: Sampler, device: torch.device) -> None:
        """drafter: the drafter of all rows. Its `reserve(capacity)` must have been called."""
        self.drafter = drafter
        self.rows = rows
        self.sampler = sampler
        # Captured starts read these tensors.
        self.prompt = torch.zeros(1, capacity, dtype=torch.long, device=device)
        self.length = torch.zeros(1, dtype=torch.long, device=device)
        self._passes: list[CapturedPass[None]] = []

    def capture(self) -> None:
        """Capture the start of each row. No row may be in use."""
        if not self.drafter.row_states():
            return
        drafters = [self._part(slice(row, row + 1)) for row in range(self.rows)]
        starts = [partial(drafter.start, self.prompt, self.length) for drafter in drafters]
        starts[0]()  # compiles the kernels
        self._passes = [capture_pass(start, self.prompt.device) for start in starts]

    def start(self, rows: slice, prompts: Tensor, lengths: Sequence[int]) -> None:
        """Start n consecutive rows. prompts: LongTensor [n, P], padded on the right."""
        if not self._passes:
            on_device = upload(torch.tensor(lengths), self.length.device)
            self._part(rows).start(prompts, on_device)
            return
        for row, prompt, count in zip(range(rows.start, rows.stop), prompts, lengths, strict=True):
            self.prompt[0, :count] = prompt[:count]
            self.prompt[0, count:] = 0
            self.length.fill_(count)
            self._passes[row]()

    def feed(self, rows: slice, *chunk: Tensor) -> None:
        """Feed a chunk of the prompts of some consecutive rows; see `DraftState.feed_prompt`."""
        self._part(rows).feed_prompt(*chunk)

    def _part(self, rows: slice) -> DraftState:
        # A drafting method of the user's own need not share its state.
        return self.drafter if rows == slice(0, self.rows) else self.drafter.share(rows, self.sampler)
