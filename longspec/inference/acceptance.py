"""Lossless acceptance: which proposed tokens the target keeps, and the bonus token that follows them."""

from dataclasses import dataclass

from torch import Tensor

from longspec.inference.drafting.proposal import Proposal
from longspec.inference.sampling import Sampler
from longspec.kernels.backend import Backend
from longspec.kernels.shared.watch import Watch


@dataclass
class Accepted:
    """The part of a proposal that the target accepts."""

    path: Tensor
    """LongTensor [B, depth + 1]: numbers of the accepted nodes, root (0) first; undefined after `count`."""
    count: Tensor
    """LongTensor [B]: number of accepted draft tokens, 0 ... depth."""
    bonus: Tensor
    """LongTensor [B]: the token that the target adds after the last accepted node."""


def accept(proposal: Proposal, logits: Tensor, sampler: Sampler, watch: Watch | None = None) -> Accepted:
    """Keep the proposed tokens that leave the target's distribution unchanged. logits [B, N, V]: the target's logits at
    every node. `proposal.sampled_from` may be overwritten."""
    if proposal.sampled_from is None:
        return follow(proposal, sampler.choose(logits, watch), sampler.backend)
    return reject(proposal, proposal.sampled_from, sampler.probabilities(logits, watch), sampler)


def follow(proposal: Proposal, choice: Tensor, backend: Backend | type[Backend]) -> Accepted:
    """Descend from the root while a child equals the target's choice at its parent; the last choice is the bonus token.
    choice: LongTensor [B, N], the argmax or a draw at every node. Exact for any tree built without knowing the
    draws."""
    return Accepted(*backend.follow_choices(proposal.tokens, proposal.parents, choice, proposal.depth))


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
    nodes = proposal.tokens, proposal.parents, q, p, sampler.uniforms(proposal.tokens), proposal.depth
    path, count, residual = sampler.backend.reject_children(*nodes, proposal.q_rows, proposal.from_lookup)
    return Accepted(path, count, sampler.draw(residual))
