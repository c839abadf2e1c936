"""Chain drafting: one token after another, by the GLIDE draft (`seq`) or by the target itself (`magicdec`)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import torch
from torch import Tensor

from longspec.inference.cache import Fault, TargetCache
from longspec.inference.drafting.proposal import Proposal, chain
from longspec.inference.sampling import Sampler


class ChainModel(Protocol):
    """A model that continues a chain token by token."""

    reads_hidden: bool

    def narrow(self, rows: slice) -> ChainModel:
        """The model for some consecutive rows, on the same state."""

    def start(self, prompts: Tensor, lengths: Tensor) -> None: ...

    def feed(self, tokens: Tensor, positions: Tensor, valid: Tensor) -> None: ...

    def row_states(self) -> list[Tensor]: ...

    def next_logits(self, tokens: Tensor, step: int, cache: TargetCache) -> Tensor:
        """Logits [B, V] after tokens, LongTensor [B], which are node number `step` of the chain; the root is node 0."""


class ChainDrafter:
    """A chain of gamma tokens: the argmax at temperature 0, else draws under the target's sampling settings."""

    def __init__(self, model: ChainModel, gamma: int, sampler: Sampler) -> None:
        self.model = model
        self.depth = gamma
        self.nodes = gamma + 1
        self.kind: Hashable = (type(self), type(model), gamma)
        self.reads_hidden = model.reads_hidden
        self.sampler = sampler
        self.start = model.start
        self.feed = model.feed
        self.row_states = model.row_states

    def share(self, rows: slice, sampler: Sampler) -> ChainDrafter:
        return ChainDrafter(self.model.narrow(rows), self.depth, sampler)

    def reserve(self, capacity: int) -> None:
        pass

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        watch = cache.watch(Fault.DRAFT)
        tokens = [root]
        distributions = []
        for step in range(self.depth):
            logits = self.model.next_logits(tokens[-1], step, cache)
            if self.sampler.greedy:
                tokens.append(self.sampler.choose(logits, watch))
            else:
                q = self.sampler.probabilities(logits, watch)
                distributions.append(q)
                tokens.append(self.sampler.draw(q, step))
        sampled_from = torch.stack(distributions, 1) if distributions else None
        return chain(torch.stack(tokens, 1), sampled_from)


class NoDraft:
    """Method `vanilla`: proposes nothing. Each pass verifies the root alone and emits one token."""

    depth = 0
    nodes = 1
    kind: Hashable = "no draft"
    reads_hidden = False

    def share(self, rows: slice, sampler: Sampler) -> NoDraft:
        return self

    def reserve(self, capacity: int) -> None:
        pass

    def start(self, prompts: Tensor, lengths: Tensor) -> None:
        pass

    def row_states(self) -> list[Tensor]:
        return []

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        return chain(root[:, None])

    def feed(self, tokens: Tensor, positions: Tensor, valid: Tensor) -> None:
        pass
