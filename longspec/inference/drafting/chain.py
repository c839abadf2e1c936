"""Chain drafting: one token after another, by the draft (`seq`) or by the target itself (`magicdec`)."""

from collections.abc import Hashable

import torch
from torch import Tensor

from longspec.inference.cache import Fault, TargetCache
from longspec.inference.drafting.decoder import DraftDecoder
from longspec.inference.drafting.proposal import Drafter, Proposal, chain
from longspec.inference.sampling import Sampler


class ChainDrafter(Drafter):
    """A chain of gamma tokens: the argmax at temperature 0, else draws under the target's sampling settings."""

    def __init__(self, model: DraftDecoder, gamma: int, sampler: Sampler) -> None:
        self.model = model
        self.parts = (model,)
        self.depth = gamma
        self.nodes = gamma + 1
        self.kind: Hashable = (type(self), type(model), gamma)
        self.reads_hidden, self.layer_inputs = model.reads_hidden, model.layer_inputs
        self.sampler = sampler

    def share(self, rows: slice, sampler: Sampler) -> "ChainDrafter":
        return ChainDrafter(self.model.narrow(rows), self.depth, sampler)

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        watch, feature = cache.watch(Fault.DRAFT), self.model.feature(cache)
        tokens = [root]
        distributions = []
        terms = None
        for step in range(self.depth):
            logits = self.model.next_logits(tokens[-1], step, cache, feature)
            terms = terms or self.sampler.draft_terms(logits.shape[1])
            logits = logits if terms is None else terms.applied(logits)
            if self.sampler.greedy:
                tokens.append(self.sampler.choose(logits, watch))
            else:
                q = self.sampler.probabilities(logits, watch)
                distributions.append(q)
                tokens.append(self.sampler.draw(q, step))
        sampled_from = torch.stack(distributions, 1) if distributions else None
        return chain(torch.stack(tokens, 1), sampled_from)


class NoDraft(Drafter):
    """Method `vanilla`: proposes nothing. Each pass verifies the root alone and emits one token."""

    depth = 0
    nodes = 1
    kind: Hashable = "no draft"

    def share(self, rows: slice, sampler: Sampler) -> "NoDraft":
        return self

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        return chain(root[:, None])
