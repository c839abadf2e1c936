"""Lossless acceptance: which proposed tokens the target keeps, and the bonus token that follows them."""

from __future__ import annotations

from collections.abc import Callable
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

    p: probabilities [B, N, V] of the target, which may be overwritten; q: `proposal.sampled_from`. For a chain this is
    speculative sampling (arXiv 2211.17192); for siblings sampled without replacement it is the recursion of arXiv
    2402.14160.

    Exactness asks of the tree: whether it holds a sampled node must not depend on that node's token, given the draws
    before it; and whether it holds a certain node must not depend on the draws at all.
    """
    uniforms = sampler.uniforms(proposal.tokens)
    if runs_triton(p):
        from longspec.kernels.decoding.rejection import reject_children

        path, count, residual = reject_children(
            proposal.tokens, proposal.parents, q, p, uniforms, proposal.depth, proposal.q_rows, proposal.from_lookup
        )
        return Accepted(path, count, sampler.draw(residual))

    walk = _Walk(proposal, q, p)
    for child in range(1, proposal.tokens.shape[1]):
        walk.visit(child, sampler.coin, uniforms[:, child])
    return Accepted(walk.path, walk.count, sampler.draw(walk.residual()))


class _Walk:
    """The descents of `reject` in a batch. Parents precede their children, so one pass in order meets the children of
    each node on a path.

    After some children of a node are rejected, with r = ratio:
        residual of p = max(p - r*q, 0) / total
        rest of q     = q without the rejected tokens / mass
    The next rejection subtracts the rest of q from the residual of p, hence r += total / mass. Both sums are computed
    anew each time, because a difference of sums would lose the improbable tokens.

    The rejection of a certain child leaves r as it is. A rejected token's entries of p and q become 0; its residual is
    0 in any case.
    """

    def __init__(self, proposal: Proposal, q: Tensor, p: Tensor) -> None:
        batch, device = len(p), p.device
        self.proposal = proposal
        self.all_p, self.all_q = p, q
        self.p, self.q = p[:, 0].clone(), q[:, 0].clone()
        """[B, V]: the distributions at the last accepted nodes, without the rejected tokens."""
        self.node = torch.zeros(batch, dtype=torch.long, device=device)
        """LongTensor [B]: the last accepted node."""
        self.count = torch.zeros_like(self.node)
        self.path = self.node[:, None].repeat(1, proposal.depth + 1)
        self.ratio = torch.zeros(batch, dtype=torch.float64, device=device)
        self.total, self.mass = torch.ones(2, batch, dtype=torch.float64, device=device)

    def visit(self, child: int, coin: Callable[[Tensor, Tensor], Tensor], uniform: Tensor) -> None:
        """Accept or reject a node in the rows whose paths end at its parent. coin: see `Sampler.coin`; probabilities
        may exceed 1. uniform: fp64 [B]."""
        rows = (self.proposal.parents[:, child] == self.node).nonzero()[:, 0]
        if not len(rows):
            return
        token, lookup = self.proposal.tokens[rows, child], self.proposal.from_lookup
        is_certain = torch.zeros_like(token, dtype=torch.bool) if lookup is None else lookup[rows, child]
        p, q = self.p[rows, token].double(), self.q[rows, token].double()
        # (residual of p) / (rest of q), at the child's token.
        rest = torch.where(is_certain, 1.0, q / self.mass[rows])
        is_accepted = coin(_residual(p, q, self.ratio[rows]) / (rest * self.total[rows]), uniform[rows])
        self._accept(rows[is_accepted], child)
        self._reject(rows[~is_accepted], token[~is_accepted], is_certain[~is_accepted])

    def residual(self) -> Tensor:
        """Proportional to the distribution [B, V] of the bonus token."""
        return _residual(self.p, self.q, self.ratio[:, None])

    def _accept(self, rows: Tensor, child: int) -> None:
        self.node[rows] = child
        self.count[rows] += 1
        steps = torch.arange(self.path.shape[1], device=rows.device)
        self.path[rows] = torch.where(steps >= self.count[rows, None], child, self.path[rows])
        self.ratio[rows], self.total[rows], self.mass[rows] = 0.0, 1.0, 1.0
        self.p[rows] = self.all_p[rows, child]
        # A leaf has no q; any will do.
        q_rows = self.proposal.q_rows
        q_row = torch.full_like(rows, child) if q_rows is None else q_rows[rows, child]
        self.q[rows] = self.all_q[rows, q_row.clamp(max=self.all_q.shape[1] - 1)]

    def _reject(self, rows: Tensor, token: Tensor, is_certain: Tensor) -> None:
        self.p[rows, token] = 0.0
        self.q[rows, token] = 0.0
        q = self.q[rows]
        ratio = self.ratio[rows] + (self.total[rows] / self.mass[rows]).where(~is_certain, 0.0)
        total, mass = _sums(_residual(self.p[rows], q, ratio[:, None]), q)
        # Where p and q agree, rounding can leave an empty residual. Its rejection has probability zero.
        is_possible = total > 0
        self.ratio[rows] = ratio.where(is_possible, self.ratio[rows])
        self.total[rows] = total.where(is_possible, self.total[rows])
        self.mass[rows] = mass


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
