"""Lossless acceptance: which proposed tokens the target keeps, and the bonus token that follows."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from longspec.inference.drafting.proposal import Proposal


class Sampler:
    """The distribution that generation follows: greedy at temperature 0, else transformers' warpers in its order."""

    def __init__(self, temperature: float, top_k: int, top_p: float, generator: torch.Generator | None = None) -> None:
        self.greedy = temperature == 0
        self.temperature = temperature
        self.generator = generator
        self.warpers = LogitsProcessorList()
        if not self.greedy and temperature != 1:
            self.warpers.append(TemperatureLogitsWarper(float(temperature)))
        if top_k > 0:
            self.warpers.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            self.warpers.append(TopPLogitsWarper(top_p))

    def probabilities(self, logits: Tensor) -> Tensor:
        """Probabilities [..., V] in fp32 (or wider) under temperature, top-k and top-p; logits [..., V]."""
        flat = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
        return self.warpers(None, flat).softmax(-1).view(logits.shape)  # type: ignore[arg-type]  # no history

    def choose(self, logits: Tensor) -> Tensor:
        """One token for each distribution in logits [..., V]: the argmax at temperature 0, else a draw."""
        return logits.argmax(-1) if self.greedy else self.draw(self.probabilities(logits))

    def draw(self, probabilities: Tensor) -> Tensor:
        """Independent draws, LongTensor [...], from probabilities [..., V]."""
        flat = probabilities.flatten(0, -2)
        return torch.multinomial(flat, 1, generator=self.generator).view(probabilities.shape[:-1])

    def coin(self, probability: Tensor) -> Tensor:
        """Independent coins, bool [...]: True with `probability` [...], where 1 and more is certain."""
        return torch.empty_like(probability).uniform_(generator=self.generator) < probability

    def arrivals(self, rates: Tensor) -> Tensor:
        """Independent exponential times [...] of events with `rates` [...]; inf for a rate of 0."""
        return torch.empty_like(rates).exponential_(generator=self.generator) / rates


@dataclass
class Accepted:
    """What a verification pass keeps of a proposal of depth d."""

    path: Tensor
    """LongTensor [B, d + 1]: node numbers from the root (0) down; entries past `count` mean nothing."""
    count: Tensor
    """LongTensor [B]: accepted draft tokens, 0 … d."""
    bonus: Tensor
    """LongTensor [B]: the target's own token after the last accepted one."""


def accept(proposal: Proposal, logits: Tensor, sampler: Sampler) -> Accepted:
    """Keep what the target would have said itself. logits [B, N, V]: the target's, at every node."""
    if proposal.sampled_from is None:
        return follow(proposal, sampler.choose(logits))
    return reject(proposal, proposal.sampled_from, sampler.probabilities(logits), sampler)


def follow(proposal: Proposal, choice: Tensor) -> Accepted:
    """Descend from the root while a child equals the target's choice at its parent; that choice is the bonus token.

    choice: LongTensor [B, N], at every node the target's argmax, or a draw from its distribution. Exact for any
    proposal that was built without seeing the draws: each emitted token is the target's own choice.
    """
    batch = choice.shape[0]
    node = torch.zeros(batch, 1, dtype=torch.long, device=choice.device)
    alive = torch.ones_like(node, dtype=torch.bool)
    count = torch.zeros_like(node)
    path = [node]
    for _ in range(proposal.depth):
        is_next = (proposal.parents == node) & (proposal.tokens == choice.gather(1, node))
        alive = alive & is_next.any(1, keepdim=True)
        node = torch.where(alive, is_next.to(torch.int8).argmax(1, keepdim=True), node)
        count = count + alive
        path.append(node)
    return Accepted(torch.cat(path, 1), count[:, 0], choice.gather(1, node)[:, 0])


def reject(proposal: Proposal, q: Tensor, p: Tensor, sampler: Sampler) -> Accepted:
    """Descend to the first child that passes min(1, p/q); every child that fails turns p into (p - q)₊ normalised and
    leaves q. The bonus token is drawn from the p that is left where no child passes.

    p: the target's probabilities [B, N, V]; q = proposal.sampled_from. For a chain this is speculative sampling
    (arXiv 2211.17192), for siblings sampled without replacement its recursion (arXiv 2402.14160).
    """
    node = torch.zeros(len(p), dtype=torch.long, device=p.device)
    count = torch.zeros_like(node)
    path = [node]
    p_here = p[:, 0]
    first = 1
    for width in proposal.shape:
        q_here, parent = _at(q, node), node
        for child in range(first, first + width):
            token = proposal.tokens[:, child, None]
            # A row that stopped further up has no children on this level.
            tried = (node == parent) & (proposal.parents[:, child] == parent)
            passed = tried & sampler.coin((p_here.gather(1, token) / q_here.gather(1, token))[:, 0])
            node = torch.where(passed, child, node)
            failed = (tried & ~passed)[:, None]
            p_here = torch.where(failed, _residual(p_here, q_here), p_here)
            q_here = torch.where(failed, _normalised(q_here.scatter(1, token, 0.0)), q_here)
        found = node != parent
        p_here = torch.where(found[:, None], _at(p, node), p_here)
        count = count + found
        path.append(node)
        first += width
    return Accepted(torch.stack(path, 1), count, sampler.draw(p_here))


def _at(values: Tensor, node: Tensor) -> Tensor:
    """values [B, N, V] at node [B]: [B, V]."""
    return values.gather(1, node[:, None, None].expand(-1, 1, values.shape[-1]))[:, 0]


def _normalised(weights: Tensor) -> Tensor:
    total = weights.sum(-1, keepdim=True)
    return torch.where(total > 0, weights / total, weights)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)₊ normalised. Rounding can leave nothing where p and q agree; a rejection there has probability zero."""
    left = (p - q).clamp(min=0)
    return torch.where(left.sum(-1, keepdim=True) > 0, _normalised(left), p)
