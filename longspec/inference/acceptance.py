"""Lossless acceptance: which proposed tokens the target keeps, and the bonus token that follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import (
    LogitsProcessor,
    LogitsProcessorList,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from longspec.inference.drafting.proposal import Proposal
from longspec.kernels.decoding.vocabulary import argmax
from longspec.kernels.decoding.vocabulary import probabilities as softmax
from longspec.kernels.shared.device import runs_triton
from longspec.kernels.shared.watch import Watch


class Sampler:
    """The distribution that generation follows: greedy at temperature 0, else transformers' warpers in its order."""

    def __init__(
        self,
        temperature: float,
        top_k: int,
        top_p: float,
        generator: torch.Generator | None = None,
        extra_warpers: Sequence[LogitsProcessor] = (),
    ) -> None:
        """extra_warpers: follow top-p; each must treat rows independently and ignore the history."""
        self.greedy = temperature == 0
        self.temperature, self.top_k, self.top_p, self.extra_warpers = temperature, top_k, top_p, extra_warpers
        self.generator = generator
        self.cuts = top_k > 0 or top_p < 1 or len(extra_warpers) > 0
        """Whether tokens are left out; else the temperature is all."""
        self.warpers = LogitsProcessorList()
        if not self.greedy and temperature != 1:
            self.warpers.append(TemperatureLogitsWarper(float(temperature)))
        if top_k > 0:
            self.warpers.append(TopKLogitsWarper(top_k))
        if top_p < 1:
            self.warpers.append(TopPLogitsWarper(top_p))
        self.warpers += extra_warpers

    def warped(self, logits: Tensor) -> tuple[Tensor, float]:
        """Logits [..., V] of the distribution, and the temperature that they are still to be divided by."""
        if not self.cuts:
            return logits, self.temperature
        flat = logits.flatten(0, -2).to(torch.promote_types(logits.dtype, torch.float32))
        return self.warpers(None, flat).view(logits.shape), 1.0  # type: ignore[arg-type]  # no history

    def probabilities(self, logits: Tensor, watch: Watch | None = None) -> Tensor:
        """Probabilities [B, ..., V] in fp32 (or wider) under all warpers; logits [B, ..., V].

        Warpers leave NaN and infinity in place, so `watch` sees them here.
        """
        return softmax(*self.warped(logits), watch)

    def choose(self, logits: Tensor, watch: Watch | None = None) -> Tensor:
        """One token for each distribution in logits [B, ..., V]: the argmax at temperature 0, else a draw."""
        return argmax(logits, watch=watch) if self.greedy else self.draw(self.probabilities(logits, watch))

    def draw(self, weights: Tensor) -> Tensor:
        """Independent draws, LongTensor [...], in proportion to weights [..., V]: of exponential arrivals the first."""
        return argmax(weights, self.exponentials(weights))

    def coin(self, probability: Tensor) -> Tensor:
        """Independent coins, bool [...]: True with `probability` [...], where 1 and more is certain."""
        return self.uniforms(probability) < probability

    def uniforms(self, like: Tensor) -> Tensor:
        """Independent uniform numbers in [0, 1) of a tensor's shape; fp64, because fp32 ones are multiples of 6e-8."""
        return torch.empty(like.shape, dtype=torch.float64, device=like.device).uniform_(generator=self.generator)

    def exponentials(self, like: Tensor) -> Tensor:
        """Independent exponential times of rate 1 of a tensor's shape; fp64, because CUDA's fp32 ones never fall below
        6e-8, which takes tokens of that probability out of a race."""
        return torch.empty(like.shape, dtype=torch.float64, device=like.device).exponential_(generator=self.generator)


@dataclass
class Accepted:
    """What a verification pass keeps of a proposal of depth d."""

    path: Tensor
    """LongTensor [B, d + 1]: node numbers from the root (0) down; entries past `count` mean nothing."""
    count: Tensor
    """LongTensor [B]: accepted draft tokens, 0 … d."""
    bonus: Tensor
    """LongTensor [B]: the target's own token after the last accepted one."""


def accept(proposal: Proposal, logits: Tensor, sampler: Sampler, watch: Watch | None = None) -> Accepted:
    """Keep what the target would have said itself. logits [B, N, V]: the target's, at every node.

    May use the proposal's `sampled_from` up: what was rejected becomes 0 there.
    """
    if proposal.sampled_from is None:
        return follow(proposal, sampler.choose(logits, watch))
    return reject(proposal, proposal.sampled_from, sampler.probabilities(logits, watch), sampler)


def follow(proposal: Proposal, choice: Tensor) -> Accepted:
    """Descend from the root while a child equals the target's choice at its parent; that choice is the bonus token.

    choice: LongTensor [B, N], at every node the target's argmax, or a draw from its distribution. Exact for any
    proposal that was built without seeing the draws: each emitted token is the target's own choice.
    """
    if runs_triton(choice):
        from longspec.kernels.decoding.descent import follow_choices

        return Accepted(*follow_choices(proposal.tokens, proposal.parents, choice, proposal.depth))
    wanted = proposal.tokens == choice.gather(1, proposal.parents.clamp(min=0))
    path, count = _descend(proposal, wanted)
    return Accepted(path, count, choice.gather(1, path[:, -1:])[:, 0])


def reject(proposal: Proposal, q: Tensor, p: Tensor, sampler: Sampler) -> Accepted:
    """Descend to the first child that passes min(1, p/q); every child that fails turns p into (p - q)₊ normalised and
    leaves q, which is normalised too. The bonus token is drawn from the p that is left where no child passes.

    p: the target's probabilities [B, N, V]; q = proposal.sampled_from. For a chain this is speculative sampling
    (arXiv 2211.17192), for siblings sampled without replacement its recursion (arXiv 2402.14160).
    """
    if runs_triton(p):
        from longspec.kernels.decoding.rejection import reject_children

        coins = sampler.uniforms(proposal.tokens)
        path, count, left = reject_children(proposal.tokens, proposal.parents, q, p, coins, proposal.depth)
    else:
        odds, ratio = _odds(proposal, q, p)
        path, count = _descend(proposal, sampler.coin(odds))
        last = path[:, -1]
        # A leaf has no q, and a ratio of 0.
        left = _left(_at(p, last), _at(q, last.clamp(max=q.shape[1] - 1)), ratio.gather(1, path[:, -1:]))
    return Accepted(path, count, sampler.draw(left))


def _odds(proposal: Proposal, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """Each node's probability [B, N] to pass (more than 1 is certain) once its earlier siblings have failed, and the
    ratio [B, N] at each node once all its children have; both fp64.

    However many children have failed, p is (p - ratio · q)₊ / total and q is what the failed ones left of q, divided
    by its mass. The next failure adds total / mass to the ratio, and the sums are taken anew: a difference of masses
    would lose what is improbable.
    """
    batch, nodes = proposal.tokens.shape
    rows = torch.arange(batch, device=p.device)
    remaining = q.clone()
    odds, ratio = torch.zeros(2, batch, nodes, dtype=torch.float64, device=p.device)
    total, mass = torch.ones(2, batch, q.shape[1], dtype=torch.float64, device=p.device)
    for child in range(1, nodes):
        exists = proposal.parents[:, child] >= 0
        at = rows, proposal.parents[:, child].clamp(min=0)
        token = *at, proposal.tokens[:, child]
        passing = mass[at] * _left(p[token], q[token], ratio[at]) / (q[token] * total[at])
        odds[:, child] = passing.where(exists, 0.0)
        remaining[token] = remaining[token].where(~exists, 0.0)
        further = ratio[at] + total[at] / mass[at]
        new_total, new_mass = _sums(_left(p[at], q[at], further[:, None]), remaining[at])
        # Rounding can leave nothing where p and q agree; a rejection there has probability zero.
        changed = exists & (new_total > 0)
        ratio[at] = further.where(changed, ratio[at])
        total[at] = new_total.where(changed, total[at])
        mass[at] = new_mass.where(exists, mass[at])
    return odds, ratio


def _left(p: Tensor, q: Tensor, ratio: Tensor) -> Tensor:
    """(p - ratio · q)₊, element by element, in fp64."""
    return (p.double() - ratio * q).clamp(min=0)


def _sums(left: Tensor, remaining: Tensor) -> tuple[Tensor, Tensor]:
    """What is left of p and of q, [B, V] each -> total and mass, fp64 [B]."""
    return left.sum(-1), remaining.sum(-1, dtype=torch.float64)


def _descend(proposal: Proposal, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """From the root down to the first child that is wanted (bool [B, N]), as long as there is one.

    Returns the path [B, depth + 1], which stays at its last node, and the number of steps [B].
    """
    node = torch.zeros(len(wanted), 1, dtype=torch.long, device=wanted.device)
    count = torch.zeros_like(node)
    path = [node]
    for _ in range(proposal.depth):
        is_next = wanted & (proposal.parents == node)
        found = is_next.any(1, keepdim=True)
        node = torch.where(found, is_next.to(torch.int8).argmax(1, keepdim=True), node)
        count = count + found
        path.append(node)
    return torch.cat(path, 1), count[:, 0]


def _at(values: Tensor, node: Tensor) -> Tensor:
    """values [B, N, V] at node [B]: [B, V]."""
    return values[torch.arange(len(node), device=node.device), node]
