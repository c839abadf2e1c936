"""The sampling settings of rows, which rounds read on the device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspec.inference.penalty_rows import PenaltyRows
from longspec.inference.request import FILTERS, PenaltyKind, Sampling
from longspec.kernels.shared.device import upload

FIELDS = ("seed", "top_k", "temperature", *(name for name in FILTERS if name != "top_k"))
"""The settings of a row that are numbers: two integers, then fractions."""


@dataclass(eq=False)
class RowSettings:
    """Settings of B rows, in tensors that are changed in place. Greedy rows draft at temperature 1 and keep all
    tokens."""

    numbers: Tensor
    """int64 [FIELDS, B]: integers, and the bits of fractions in fp64."""
    greedy: Tensor
    """bool [B]."""
    positions: Tensor
    """int32 [B]: the root's position. A cache has this tensor as the number of its accepted tokens."""
    penalties: PenaltyRows | None = None
    """None as long as no row has any."""

    @classmethod
    def allocate(cls, rows: int, device: torch.device, penalties: PenaltyKind | None = None) -> RowSettings:
        """Greedy rows. penalties: those that the rows can have; the texts have no room before `PenaltyRows.reserve`."""
        numbers = torch.zeros(len(FIELDS), rows, dtype=torch.long, device=device)
        positions = torch.zeros(rows, dtype=torch.int32, device=device)
        settings = cls(numbers, torch.ones(rows, dtype=torch.bool, device=device), positions)
        if penalties is not None:
            settings.penalties = PenaltyRows.allocate(rows, 0, penalties, device)
        settings.assign(slice(0, rows), [Sampling()] * rows, [0] * rows)
        return settings

    def narrow(self, rows: slice) -> RowSettings:
        """The consecutive `rows`, in the same tensors."""
        penalties = None if self.penalties is None else self.penalties.narrow(rows)
        return RowSettings(self.numbers[:, rows], self.greedy[rows], self.positions[rows], penalties)

    def __getitem__(self, name: str) -> Tensor:
        """One of FIELDS, [B]: int64 for the first two, fp64 for the others. A top_k above the size of the vocabulary
        keeps all tokens. All 64 bits of a seed count."""
        index = FIELDS.index(name)
        return self.numbers[index] if index < 2 else self.numbers[index].view(torch.float64)

    def assign(self, rows: slice | Tensor, samplings: Sequence[Sampling], seeds: Sequence[int]) -> None:
        """Set the settings of some rows, without waiting for the device.

        seeds: 0 to 2^64 - 1; they replace those of `samplings`.
        """
        settings = [Sampling(temperature=1.0) if sampling.greedy else sampling for sampling in samplings]
        integers = [[seed - (seed >> 63 << 64) for seed in seeds], [s.top_k or 2**31 for s in settings]]
        fractions = [[getattr(sampling, name) for sampling in settings] for name in FIELDS[2:]]
        packed = torch.cat([torch.tensor(integers), torch.tensor(fractions, dtype=torch.float64).view(torch.long)])
        device = self.numbers.device
        self.numbers[:, rows] = upload(packed, device)
        self.greedy[rows] = upload(torch.tensor([sampling.greedy for sampling in samplings]), device)
        if self.penalties is not None:
            self.penalties.assign(rows, samplings)
