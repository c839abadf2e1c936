"""A drafter for a batch in which only some rows speculate."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace

import torch
from torch import Tensor

from longspec.inference.cache import TargetCache
from longspec.inference.drafting.proposal import Drafter, Proposal
from longspec.inference.sampling import Sampler


class SelectiveDrafter:
    """Reduces the proposals of another drafter to the root in all other rows, which then emit one token per round.

    A root without children accepts nothing, and its bonus token follows the target's whole distribution.
    """

    def __init__(self, drafter: Drafter, speculates: Tensor) -> None:
        """speculates: bool [B], changed in place from outside."""
        self.drafter = drafter
        self.speculates = speculates
        self.depth = drafter.depth
        self.nodes = drafter.nodes
        self.kind: Hashable = (type(self), drafter.kind)
        self.reads_hidden = drafter.reads_hidden
        self.reserve = drafter.reserve
        self.start = drafter.start
        self.feed = drafter.feed
        self.row_states = drafter.row_states

    def share(self, rows: slice, sampler: Sampler) -> SelectiveDrafter:
        return SelectiveDrafter(self.drafter.share(rows, sampler), self.speculates[rows])

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        proposal = self.drafter.propose(root, cache)
        return replace(proposal, parents=torch.where(self.speculates[:, None], proposal.parents, -1))
