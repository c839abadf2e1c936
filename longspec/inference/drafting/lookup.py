"""Prompt lookup, a peer that needs no training: what followed the last tokens when they occurred before."""

from __future__ import annotations

from collections.abc import Hashable
from functools import cached_property

import torch
from torch import Tensor

from longspec.inference.cache import TargetCache
from longspec.inference.drafting.proposal import Proposal, chain
from longspec.inference.runner import Runner

LONGEST_MATCH = 3
"""Tokens, the root included, that an earlier place is matched on at most."""


class LookupDrafter:
    """gamma tokens that followed the latest of the places which match the last tokens, the root included, furthest.

    Built without chance, so acceptance follows the target's own draws. All of it is tensor operations of static shape.
    """

    reads_hidden = False

    def __init__(self, runner: Runner, batch: int, gamma: int) -> None:
        self.runner = runner
        self.depth = gamma
        self.nodes = gamma + 1
        self.batch = batch
        self.kind: Hashable = type(self), gamma

    @cached_property
    def history(self) -> Tensor:
        """LongTensor [B, positions]: each row's tokens by position; behind the root anything."""
        return torch.zeros(self.batch, self.runner.positions, dtype=torch.long, device=self.runner.device)

    def start(self, prompts: Tensor, lengths: Tensor) -> None:
        self.history[:, : prompts.shape[1]] = prompts

    def feed(self, tokens: Tensor, positions: Tensor, valid: Tensor) -> None:
        positions = positions.long()
        self.history.scatter_(1, positions, tokens.where(valid, self.history.gather(1, positions)))

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        end = cache.lengths[:, None].long()
        self.history.scatter_(1, end, root[:, None])
        places = torch.arange(self.history.shape[1], device=root.device)
        matched = torch.zeros_like(self.history)
        unbroken = (places < end).expand_as(matched)
        for back in range(LONGEST_MATCH):
            last = self.history.gather(1, (end - back).clamp(min=0))
            unbroken = unbroken & (places >= back) & (self.history.roll(back, 1) == last) & (end >= back)
            matched = matched + unbroken
        latest_of_the_longest = (matched * len(places) + places).where(matched > 0, -1).argmax(1, keepdim=True)
        ahead = latest_of_the_longest + torch.arange(1, self.depth + 1, device=root.device)
        following = self.history.gather(1, ahead.clamp(max=len(places) - 1))
        return chain(torch.cat([root[:, None], following], 1))
