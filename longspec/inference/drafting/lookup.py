"""Prompt lookup: proposes the tokens that followed an earlier occurrence of the newest tokens. Needs no draft."""

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


class TokenHistory(RowState):
    """The text of each row."""

    def __init__(self, batch: int, device: torch.device) -> None:
        self.tokens = torch.zeros(batch, 0, dtype=torch.long, device=device)
        """LongTensor [B, capacity]: the token at each position; after the root, 0 or the prompts' padding."""

    def narrow(self, rows: slice) -> "TokenHistory":
        part = copy(self)
        part.tokens = self.tokens[rows]
        return part

    def reserve(self, capacity: int) -> None:
        if self.tokens.shape[1] < capacity:
            self.tokens = self.tokens.new_zeros(len(self.tokens), capacity)

    def start(self, prompts: Tensor, lengths: Tensor) -> None:
        """The rest of a row becomes 0, because it can have held other tokens."""
        self.tokens[:, : prompts.shape[1]] = prompts
        self.tokens[:, prompts.shape[1] :] = 0

    def feed(self, tokens: Tensor, positions: Tensor, valid: Tensor, states: Tensor | None = None) -> None:
        positions = positions.long()
        self.tokens.scatter_(1, positions, tokens.where(valid, self.tokens.gather(1, positions)))

    def row_states(self) -> list[Tensor]:
        return [self.tokens]


class LookupDrafter(Drafter):
    """A chain of gamma tokens: those that followed the longest earlier match with the newest tokens, the latest one of
    that length. It is deterministic, so acceptance follows the target's own draws."""

    def __init__(self, history: TokenHistory, gamma: int) -> None:
        self.history = history
        self.parts = (history,)
        self.depth = gamma
        self.nodes = gamma + 1
        self.kind: Hashable = (type(self), gamma)

    def share(self, rows: slice, sampler: Sampler) -> "LookupDrafter":
        return LookupDrafter(self.history.narrow(rows), self.depth)

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        text = self.history.tokens
        text.scatter_(1, cache.lengths[:, None].long(), root[:, None])
        # Without a match the chain starts anywhere.
        ends, _ = longest_matches(text, cache.lengths, LONGEST_MATCH, chains=1)
        following = ends + torch.arange(1, self.depth + 1, device=root.device)
        tokens = text.gather(1, following.clamp(max=text.shape[1] - 1))
        proposal = chain(torch.cat([root[:, None], tokens], 1))
        proposal.from_lookup = torch.ones_like(proposal.tokens, dtype=torch.bool)
        return proposal


class LookupBranches(RowState):
    """Continuations of earlier matches that join a tree as branches, with their probability estimated from the row's
    earlier ones. They depend on the tokens before the root alone, not on draws."""

    def __init__(self, runner: Runner, history: TokenHistory) -> None:
        """history: fed and started by others."""
        self.backend, device = runner.backend, runner.device
        self.history, batch = history, len(history.tokens)
        # A round feeds as many tokens as its longest path has, and the draft keeps at most a window of them.
        self.depth = min(runner.model.draft_model.window - 1, max(BRANCH_SIZES))
        sizes = [min(size, self.depth) for size in BRANCH_SIZES]
        self.nodes = sum(sizes)
        self.sizes = torch.tensor(sizes, device=device)
        shape = (batch, len(sizes), self.depth)
        self._state = LookupState(
            history=history.tokens,
            hits=torch.zeros(batch, len(PRIORS), device=device),
            trials=torch.zeros(batch, len(PRIORS), device=device),
            priors=torch.tensor(PRIORS, device=device),
            tokens=torch.zeros(shape, dtype=torch.long, device=device),
            scores=torch.full(shape, -torch.inf, device=device),
            match_lengths=torch.zeros(shape[:2], dtype=torch.long, device=device),
            roots=torch.zeros(batch, dtype=torch.long, device=device),
        )

    def narrow(self, rows: slice) -> "LookupBranches":
        part = copy(self)
        part.history = self.history.narrow(rows)
        part._state = LookupState(*(values[rows] for values in self._state))._replace(priors=self._state.priors)
        return part

    @property
    def state(self) -> LookupState:
        return self._state._replace(history=self.history.tokens)

    def start(self, prompts: Tensor, lengths: Tensor) -> None:
        for values in (self.state.hits, self.state.trials, self.state.match_lengths):
            values.zero_()

    def row_states(self) -> list[Tensor]:
        state = self._state
        return [state.hits, state.trials, state.tokens, state.match_lengths, state.roots]

    def propose(self, root: Tensor, lengths: Tensor) -> Branches:
        """The branches below root, LongTensor [B], at positions lengths [B]. Every round returns the same tensors."""
        self.backend.extend_branches(self.state, root, lengths, self.sizes, PRIOR_WEIGHT)
        return Branches(self._state.tokens, self._state.scores)
