"""Prompt lookup: proposes the tokens that followed an earlier occurrence of the newest tokens. Needs no draft."""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy

import torch
from torch import Tensor

from longspec.inference.cache import TargetCache
from longspec.inference.drafting.proposal import Proposal, chain
from longspec.inference.sampling import Sampler

LONGEST_MATCH = 3
"""Maximum length of a match in tokens, the root included."""


class LookupDrafter:
    """A chain of gamma tokens: those that followed the longest earlier match with the newest tokens.

    Among matches of equal length the latest one is used. The chain is built deterministically, so acceptance follows
    the target's own draws. All operations have static shapes.
    """

    reads_hidden = False

    def __init__(self, batch: int, gamma: int, device: torch.device) -> None:
        self.depth = gamma
        self.nodes = gamma + 1
        self.kind: Hashable = (type(self), gamma)
        self.history = torch.zeros(batch, 0, dtype=torch.long, device=device)
        """LongTensor [B, capacity]: the token at each position; after the root, 0 or the prompts' padding."""

    def share(self, rows: slice, sampler: Sampler) -> LookupDrafter:
        part = copy(self)
        part.history = self.history[rows]
        return part

    def with_depth(self, gamma: int) -> LookupDrafter:
        """A drafter of chains of `gamma` tokens on the same history."""
        part = copy(self)
        part.depth = gamma
        part.nodes = gamma + 1
        part.kind = (type(self), gamma)
        return part

    def reserve(self, capacity: int) -> None:
        if self.history.shape[1] < capacity:
            self.history = self.history.new_zeros(len(self.history), capacity)

    def start(self, prompts: Tensor, lengths: Tensor, prompt_lengths: Tensor | None = None) -> None:
        self.history[:, : prompts.shape[1]] = prompts
        self.history[:, prompts.shape[1] :] = 0  # a chain can read past the root, and a row can have held other tokens

    def feed(self, tokens: Tensor, positions: Tensor, valid: Tensor) -> None:
        positions = positions.long()
        self.history.scatter_(1, positions, tokens.where(valid, self.history.gather(1, positions)))

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        root_position = cache.lengths[:, None].long()
        self.history.scatter_(1, root_position, root[:, None])

        # match_length[b, p]: number of tokens up to position p that equal those up to the root, at most LONGEST_MATCH.
        positions = torch.arange(self.history.shape[1], device=root.device)
        match_length = torch.zeros_like(self.history)
        matches = (positions < root_position).expand_as(match_length)
        for back in range(LONGEST_MATCH):
            newest = self.history.gather(1, (root_position - back).clamp(min=0))
            exists = (positions >= back) & (root_position >= back)
            matches = matches & exists & (self.history.roll(back, 1) == newest)
            match_length = match_length + matches

        # The longest match first, then the latest position. Without a match the chain starts anywhere.
        score = (match_length * len(positions) + positions).where(match_length > 0, -1)
        best = score.argmax(1, keepdim=True)
        following = best + torch.arange(1, self.depth + 1, device=root.device)
        tokens = self.history.gather(1, following.clamp(max=len(positions) - 1))
        return chain(torch.cat([root[:, None], tokens], 1))
