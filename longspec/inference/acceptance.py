"""Lossless acceptance: which proposed tokens the target keeps, and the bonus token that follows them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from longspec.inference.drafting.proposal import Proposal
from longspec.inference.sampling import Sampler
from longspec.kernels.shared.device import runs_triton
from longspec.kernels.shared.watch import Watch


@dataclass
class Accepted:
    """The part of a proposal that the target accepts."""

    path: Tensor
    """LongTensor [B, depth + 1]: numbers of the accepted nodes, starting with the root (0). Entries past `count` are
    undefined."""
    count: Tensor
    """LongTensor [B]: number of accepted draft tokens, 0 ... depth."""
    bonus: Tensor
    """LongTensor [B]: the token that the target adds after the last accepted node."""


def accept(proposal: Proposal, logits: Tensor, sampler: Sampler, watch: Watch | None = None) -> Accepted:
    """Keep the proposed tokens that leave the target's distribution unchanged.

    logits [B, N, V]: the target's logits at every node. `proposal.sampled_from` may be overwritten.
    """
    if proposal.sampled_from is None:
        return follow(proposal, sampler.choose(logits, watch))
    return reject(proposal, proposal.sampled_from, sampler.probabilities(logits, watch), sampler)


def follow(proposal: Proposal, choice: Tensor) -> Accepted:
    """Descend from the root while a child equals the target's choice at its parent; the last choice is the bonus token.

    choice: LongTensor [B, N], the argmax or a draw of the target's distribution at every node. Every emitted token is
    the target's own choice, so the rule is exact for any tree that was built without knowing the draws.
    """
    if runs_triton(choice):
        from longspec.kernels.decoding.descent import follow_choices

        return Accepted(*follow_choices(proposal.tokens, proposal.parents, choice, proposal.depth))

    is_chosen = proposal.tokens == choice.gather(1, proposal.parents.clamp(min=0))
    path, count = _descend(proposal, is_chosen)
    bonus = choice.gather(1, path[:, -1:])[:, 0]
    return Accepted(path, count, bonus)


def reject(proposal: Proposal, q: Tensor, p: Tensor, sampler: Sampler) -> Accepted:
    """Recursive rejection sampling: descend to the first child that is accepted with probability min(1, p/q).

    A rejected child turns p into max(p - q, 0), normalized, and its token is removed from q, which is normalized too.
    Where no child is accepted, the bonus token is drawn from the remaining p.

    A node from prompt lookup is certain: it was proposed without chance, and is accepted with the probability p of its
    token. If it is rejected, its token is removed from p and from q, and both are normalized.

    p: probabilities [B, N, V] of the target, which are overwritten; q: `proposal.sampled_from`. For a chain this is
    speculative sampling (arXiv 2211.17192); for siblings sampled without replacement it is the recursion of arXiv
    2402.14160.

    Exactness asks of the tree: whether it holds a sampled node must not depend on that node's token, given the draws
    before it; and whether it holds a certain node must not depend on the draws at all.
    """
    if runs_triton(p):
        from longspec.kernels.decoding.rejection import reject_children

        uniforms = sampler.uniforms(proposal.tokens)
        path, count, residual = reject_children(
            proposal.tokens, proposal.parents, q, p, uniforms, proposal.depth, proposal.q_rows, proposal.from_lookup
        )
        return Accepted(path, count, sampler.draw(residual))

    q = _q_of_nodes(proposal, q)
    probability, ratio = _acceptance_probabilities(proposal, q, p)
    path, count = _descend(proposal, sampler.coin(probability))
    last = path[:, -1]
    residual = _residual(_at_node(p, last), _at_node(q, last), ratio.gather(1, path[:, -1:]))
    return Accepted(path, count, sampler.draw(residual))


def _q_of_nodes(proposal: Proposal, q: Tensor) -> Tensor:
    """The draft's distribution [B, N, V] at each node. A leaf has none; its ratio stays 0, so any row of q will do."""
    rows = proposal.q_rows
    if rows is None:
        rows = torch.arange(proposal.tokens.shape[1], device=q.device).expand_as(proposal.tokens)
    return q[torch.arange(len(q), device=q.device)[:, None], rows.clamp(max=q.shape[1] - 1)]


def _acceptance_probabilities(proposal: Proposal, q: Tensor, p: Tensor) -> tuple[Tensor, Tensor]:
    """For each node the probability [B, N] of acceptance, given that its earlier siblings were rejected, and the ratio
    [B, N] that defines its own residual once all its children are rejected. Both fp64; probabilities may exceed 1.

    After some children of a node are rejected, with r = ratio:
        residual of p = max(p - r*q, 0) / total
        rest of q     = q without the rejected tokens / mass
    The next rejection subtracts the rest of q from the residual of p, hence r += total / mass. Both sums are computed
    anew each time, because a difference of sums would lose the improbable tokens.

    The rejection of a certain child sets its token's entries of p and q to 0, in place, and leaves r as it is. p, q:
    [B, N, V] at every node.
    """
    batch, nodes = proposal.tokens.shape
    rows = torch.arange(batch, device=p.device)
    remaining = q.clone()  # 0 for rejected tokens
    probability, ratio = torch.zeros(2, batch, nodes, dtype=torch.float64, device=p.device)
    total, mass = torch.ones(2, batch, nodes, dtype=torch.float64, device=p.device)
    never = torch.zeros(batch, dtype=torch.bool, device=p.device)

    for child in range(1, nodes):
        exists = proposal.parents[:, child] >= 0
        is_certain = never if proposal.from_lookup is None else exists & proposal.from_lookup[:, child]
        parent = (rows, proposal.parents[:, child].clamp(min=0))
        token = (*parent, proposal.tokens[:, child])

        # (residual of p) / (rest of q), at the child's token.
        residual = _residual(p[token], q[token], ratio[parent])
        rest = torch.where(is_certain, 1.0, q[token] / mass[parent])
        probability[:, child] = (residual / (rest * total[parent])).where(exists, 0.0)

        # Reject the child, for the siblings that follow.
        remaining[token] = remaining[token].where(~exists, 0.0)
        p[token] = p[token].where(~is_certain, 0.0)
        q[token] = q[token].where(~is_certain, 0.0)
        next_ratio = ratio[parent] + (total[parent] / mass[parent]).where(~is_certain, 0.0)
        next_residual = _residual(p[parent], q[parent], next_ratio[:, None])
        next_total, next_mass = _sums(next_residual, remaining[parent])
        # Where p and q agree, rounding can leave an empty residual. Its rejection has probability zero.
        is_possible = exists & (next_total > 0)
        ratio[parent] = next_ratio.where(is_possible, ratio[parent])
        total[parent] = next_total.where(is_possible, total[parent])
        mass[parent] = next_mass.where(exists, mass[parent])
    return probability, ratio


def _residual(p: Tensor, q: Tensor, ratio: Tensor) -> Tensor:
    """max(p - ratio * q, 0) elementwise, in fp64."""
    return (p.double() - ratio * q).clamp(min=0)


def _sums(residual: Tensor, remaining: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the vocabulary of the residual of p and of the rest of q, [B, V] each -> fp64 [B] each."""
    return residual.sum(-1), remaining.sum(-1, dtype=torch.float64)


def _descend(proposal: Proposal, accepted: Tensor) -> tuple[Tensor, Tensor]:
    """Walk from the root to the first child with accepted[b, child], as long as there is one. accepted: bool [B, N].

    Returns the path [B, depth + 1], which repeats its last node, and the number of steps [B].
    """
    node = torch.zeros(len(accepted), 1, dtype=torch.long, device=accepted.device)
    count = torch.zeros_like(node)
    path = [node]
    for _ in range(proposal.depth):
        candidates = accepted & (proposal.parents == node)
        has_next = candidates.any(1, keepdim=True)
        first = candidates.to(torch.int8).argmax(1, keepdim=True)
        node = torch.where(has_next, first, node)
        count = count + has_next
        path.append(node)
    return torch.cat(path, 1), count[:, 0]


def _at_node(values: Tensor, node: Tensor) -> Tensor:
    """values [B, N, V] at node [B] -> [B, V]."""
    return values[torch.arange(len(node), device=node.device), node]
