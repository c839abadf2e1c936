"""Prompt lookup: proposes the tokens that followed an earlier occurrence of the newest tokens. Needs no draft."""

from __future__ import annotations

from collections.abc import Hashable
from copy import copy

import torch
from torch import Tensor

from longspec.inference.cache import TargetCache
from longspec.inference.drafting.proposal import Drafter, Proposal, chain
from longspec.inference.drafting.row_state import RowState
from longspec.inference.runner import Runner
from longspec.inference.sampling import Sampler
from longspec.kernels.shared.tree import Branches, LookupState
from longspec.kernels.torch.lookup import longest_matches

LONGEST_MATCH = 3
"""Maximum length of a match in tokens, the root included."""
BRANCH_SIZES = (20, 4)
"""Number of tokens of each branch; the first one follows the longest match."""
PRIORS = (0.15, 0.4, 0.55, 0.65, 0.75, 0.8, 0.85, 0.92)
"""Share of tokens that continue a match of 1, 2, ... tokens rightly, as expected before any trial."""
PRIOR_WEIGHT = 4.0
"""Number of trials that PRIORS count as."""


def store_tokens(history: Tensor, tokens: Tensor, positions: Tensor, valid: Tensor) -> None:
    """Write tokens [B, T] to history [B, S] at positions [B, T], where `valid`."""
    positions = positions.long()
    history.scatter_(1, positions, tokens.where(valid, history.gather(1, positions)))


def store_prompts(history: Tensor, prompts: Tensor) -> None:
    """Fill history [B, S] with prompts [B, P]. The rest becomes 0, because a row can have held other tokens."""
    history[:, : prompts.shape[1]] = prompts
    history[:, prompts.shape[1] :] = 0


class LookupDrafter(Drafter):
    """A chain of gamma tokens: those that followed the longest earlier match with the newest tokens.

    Among matches of equal length the latest one is used. The chain is built deterministically, so acceptance follows
    the target's own draws. All operations have static shapes.
    """

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

    def start(self, prompts: Tensor, lengths: Tensor) -> None:
        store_prompts(self.history, prompts)

    def feed(self, tokens: Tensor, positions: Tensor, valid: Tensor, states: Tensor | None = None) -> None:
        store_tokens(self.history, tokens, positions, valid)

    def row_states(self) -> list[Tensor]:
        return [self.history]

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        self.history.scatter_(1, cache.lengths[:, None].long(), root[:, None])
        # Without a match the chain starts anywhere.
        ends, _ = longest_matches(self.history, cache.lengths, LONGEST_MATCH, chains=1)
        following = ends + torch.arange(1, self.depth + 1, device=root.device)
        tokens = self.history.gather(1, following.clamp(max=self.history.shape[1] - 1))
        proposal = chain(torch.cat([root[:, None], tokens], 1))
        proposal.from_lookup = torch.ones_like(proposal.tokens, dtype=torch.bool)
        return proposal


class LookupBranches(RowState):
    """Continuations of earlier matches that join a tree as branches, with their probability estimated from the share of
    such continuations that were right so far in the row.

    The branches depend on the tokens before the tree's root alone, and not on draws of the round.
    """

    def __init__(self, runner: Runner, batch: int, depth: int) -> None:
        """depth: largest number of tokens of a branch."""
        self.backend, device = runner.backend, runner.device
        self.depth = min(depth, max(BRANCH_SIZES))
        sizes = [min(size, self.depth) for size in BRANCH_SIZES]
        self.nodes = sum(sizes)
        self.sizes = torch.tensor(sizes, device=device)
        shape = (batch, len(sizes), self.depth)
        self.state = LookupState(
            history=torch.zeros(batch, 0, dtype=torch.long, device=device),
            hits=torch.zeros(batch, len(PRIORS), device=device),
            trials=torch.zeros(batch, len(PRIORS), device=device),
            priors=torch.tensor(PRIORS, device=device),
            tokens=torch.zeros(shape, dtype=torch.long, device=device),
            scores=torch.full(shape, -torch.inf, device=device),
            match_lengths=torch.zeros(shape[:2], dtype=torch.long, device=device),
            roots=torch.zeros(batch, dtype=torch.long, device=device),
        )

    def narrow(self, rows: slice) -> LookupBranches:
        """The branches of some consecutive rows, on the same state."""
        part = copy(self)
        priors = self.state.priors
        part.state = LookupState(*(values[rows] for values in self.state))._replace(priors=priors)
        return part

    def reserve(self, capacity: int) -> None:
        history = self.state.history
        if history.shape[1] < capacity:
            self.share_history(history.new_zeros(len(history), capacity))

    def share_history(self, history: Tensor) -> None:
        """Take over history, LongTensor [B, capacity], which others may feed as well."""
        self.state = self.state._replace(history=history)

    def start(self, prompts: Tensor, lengths: Tensor) -> None:
        store_prompts(self.state.history, prompts)
        for values in (self.state.hits, self.state.trials, self.state.match_lengths):
            values.zero_()

    def feed(self, tokens: Tensor, positions: Tensor, valid: Tensor, states: Tensor | None = None) -> None:
        store_tokens(self.state.history, tokens, positions, valid)

    def row_states(self) -> list[Tensor]:
        state = self.state
        return [state.history, state.hits, state.trials, state.tokens, state.match_lengths, state.roots]

    def propose(self, root: Tensor, lengths: Tensor) -> Branches:
        """The branches below root, LongTensor [B], at positions lengths [B]. Every round returns the same tensors."""
        self.backend.extend_branches(self.state, root, lengths, self.sizes, PRIOR_WEIGHT)
        return Branches(self.state.tokens, self.state.scores)
