"""Starts the drafter of a row on its prompt. Where rounds are CUDA graphs, so is this."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from longspec.inference.capture import CapturedPass, capture_pass
from longspec.inference.drafting.proposal import DraftState
from longspec.inference.sampling import Sampler


class DraftStarter:
    """Starts take dozens of small kernels, whose launches would take longer than a round of a small target."""

    def __init__(self, drafter: DraftState, rows: int, capacity: int, sampler: Sampler, device: torch.device) -> None:
        """drafter: the drafter of all rows. Its `reserve(capacity)` must have been called."""
        self.drafters = [drafter.share(slice(row, row + 1), sampler) for row in range(rows)]
        # Captured starts read these tensors.
        self.prompt = torch.zeros(1, capacity, dtype=torch.long, device=device)
        self.length = torch.zeros(1, dtype=torch.long, device=device)
        self._passes: list[CapturedPass[None]] = []

    def capture(self) -> None:
        """Capture the start of each row. No row may be in use."""
        if not self.drafters[0].row_states():
            return
        starts = [partial(drafter.start, self.prompt, self.length) for drafter in self.drafters]
        starts[0]()  # compiles the kernels
        self._passes = [capture_pass(start, self.prompt.device) for start in starts]

    def start(self, row: int, prompt: Tensor) -> None:
        """Start a row. prompt: LongTensor [1, P]."""
        count = prompt.shape[1]
        if not self._passes:
            self.drafters[row].start(prompt, torch.full_like(self.length, count))
            return
        self.prompt[:, :count] = prompt
        self.prompt[:, count:] = 0
        self.length.fill_(count)
        self._passes[row]()
