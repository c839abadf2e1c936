"""Chain drafting: one token after another, by the GLIDE draft (`seq`) or by the target itself (`magicdec`)."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol

import torch
from torch import Tensor

from longspec.inference.acceptance import Sampler
from longspec.inference.cache import Fault, TargetCache
from longspec.inference.drafting.proposal import Proposal, chain


class ChainModel(Protocol):
    """A model that can continue a chain."""

    reads_hidden: bool

    def start(self, prompts: Tensor, lengths: Tensor) -> None: ...

    def feed(self, tokens: Tensor, positions: Tensor, valid: Tensor) -> None: ...

    def next_logits(self, tokens: Tensor, step: int, cache: TargetCache) -> Tensor:
        """Logits [B, V] after tokens [B], node number `step` of the chain that starts at the root."""


class ChainDrafter:
    """gamma tokens in a row: the likeliest at temperature 0, else drawn under the target's own sampling settings."""

    def __init__(self, model: ChainModel, gamma: int, sampler: Sampler) -> None:
        self.model = model
        self.depth = gamma
        self.nodes = gamma + 1
        self.kind: Hashable = type(self), type(model), gamma
        self.reads_hidden = model.reads_hidden
        self.sampler = sampler
        self.start, self.feed = model.start, model.feed

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        tokens, distributions, watch = [root], [], cache.watch(Fault.DRAFT)
        for step in range(self.depth):
            logits = self.model.next_logits(tokens[-1], step, cache)
            if self.sampler.greedy:
                tokens.append(self.sampler.choose(logits, watch))
            else:
                distributions.append(self.sampler.probabilities(logits, watch))
                tokens.append(self.sampler.draw(distributions[-1]))
        return chain(torch.stack(tokens, 1), torch.stack(distributions, 1) if distributions else None)


class NoDraft:
    """`vanilla`: nothing is proposed, each pass verifies the root alone and emits one token."""

    depth = 0
    nodes = 1
    kind: Hashable = "no draft"
    reads_hidden = False

    def start(self, prompts: Tensor, lengths: Tensor) -> None:
        pass

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        return chain(root[:, None])

    def feed(self, tokens: Tensor, positions: Tensor, valid: Tensor) -> None:
        pass
