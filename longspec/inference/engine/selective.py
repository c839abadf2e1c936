"""A drafter for a batch in which only some rows speculate."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from longspec.inference.cache import TargetCache
from longspec.inference.drafting.proposal import Drafter, Proposal, WrappedDrafter
from longspec.inference.sampling import Sampler


class SelectiveDrafter(WrappedDrafter):
    """Reduces the proposals of another drafter to the root in all other rows, which then emit one token per round.

    A root without children accepts nothing, and its bonus token follows the target's whole distribution.
    """

    def __init__(self, drafter: Drafter, speculates: Tensor) -> None:
        """speculates: bool [B], changed in place from outside."""
        super().__init__(drafter)
        self.speculates = speculates

    def share(self, rows: slice, sampler: Sampler) -> SelectiveDrafter:
        return SelectiveDrafter(self.drafter.share(rows, sampler), self.speculates[rows])

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        proposal = self.drafter.propose(root, cache)
        return replace(proposal, parents=torch.where(self.speculates[:, None], proposal.parents, -1))
