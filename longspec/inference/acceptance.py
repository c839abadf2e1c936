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

    def uniform(self, like: Tensor) -> Tensor:
        return torch.rand(like.shape, generator=self.generator, device=like.device, dtype=like.dtype)


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
    if proposal.sampled_from is None or sampler.greedy:
        return follow(proposal, sampler.choose(logits))
    return accept_sampled_chain(proposal, sampler.probabilities(logits), sampler)


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


def accept_sampled_chain(proposal: Proposal, p: Tensor, sampler: Sampler) -> Accepted:
    """Speculative sampling (arXiv 2211.17192): accept with min(1, p/q), else draw from (p - q)₊ normalised.

    p: the target's probabilities [B, d + 1, V] along the chain; q = proposal.sampled_from [B, d, V], what each
    token was really sampled from.
    """
    q = proposal.sampled_from
    assert q is not None
    depth = proposal.depth
    drafted = proposal.tokens[:, 1:, None]
    p_drafted, q_drafted = p[:, :depth].gather(2, drafted)[..., 0], q.gather(2, drafted)[..., 0]
    kept = sampler.uniform(q_drafted) * q_drafted < p_drafted
    count = kept.long().cumprod(1).sum(1)
    # Past the chain's end q is 0, so that the residual there is p itself: the bonus token of a full acceptance.
    q_at = torch.cat([q, torch.zeros_like(q[:, :1])], 1)
    here = count[:, None, None].expand(-1, 1, p.shape[-1])
    p_here, q_here = p.gather(1, here)[:, 0], q_at.gather(1, here)[:, 0]
    residual = (p_here - q_here).clamp(min=0)
    # Rounding can leave no residual where p and q agree; a rejection there has probability zero.
    residual = torch.where(residual.sum(-1, keepdim=True) > 0, residual, p_here)
    path = torch.arange(depth + 1, device=count.device).expand(len(count), -1)
    return Accepted(path, count, sampler.draw(residual))
