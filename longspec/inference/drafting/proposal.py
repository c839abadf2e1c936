"""Proposals, which drafters pass to verification, and the base of all drafters."""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from longspec.inference.adaptive.plans import Plan
from longspec.inference.cache import TargetCache
from longspec.inference.drafting.row_state import RowState
from longspec.inference.sampling import Sampler


@dataclass
class Proposal:
    """A tree of N nodes per row. Node 0 is the root: the row's newest token, which the target has not read yet."""

    tokens: Tensor
    """LongTensor [B, N]: the token of each node."""
    parents: Tensor
    """LongTensor [B, N]: the number of each node's parent, which is lower than its own. -1 for the root, and for nodes
    that only fill up the tree where the draft's distribution had no tokens left."""
    levels: Tensor
    """LongTensor [N] or [B, N]: the depth of each node, 0 for the root; [N] if it is the same for all rows."""
    visible: Tensor
    """bool [B, N, N]: visible[b, i, j] is True if j is i or an ancestor of i."""
    depth: int
    """Number of draft tokens on the longest possible path."""
    sampled_from: Tensor | None = None
    """[B, R, V]: the draft distribution q at inner nodes. A node's children are samples of its q without replacement,
    numbered in the order of sampling. None for a tree that was built deterministically."""
    q_rows: Tensor | None = None
    """LongTensor [B, N]: the row of `sampled_from` of each node, from R on for leaves. None: as numbered."""
    from_lookup: Tensor | None = None
    """bool [B, N]: nodes from prompt lookup. They are proposed without chance, whatever q says, and each has a lower
    number than its sampled siblings. None: no node."""
    ranks: Tensor | None = None
    """LongTensor [B, N]: the nodes in the order in which smaller budgets would keep them, or None."""

    def levels_by_rank(self) -> Tensor:
        """LongTensor [B, N]: the levels to grow for the node of each rank; 0 for the root and for nodes from lookup."""
        assert self.ranks is not None
        levels = self.levels.expand_as(self.tokens)
        if self.from_lookup is not None:
            levels = levels.masked_fill(self.from_lookup, 0)
        return torch.empty_like(self.ranks).scatter_(1, self.ranks, levels)


def chain(tokens: Tensor, sampled_from: Tensor | None = None) -> Proposal:
    """A tree without branches. tokens: LongTensor [B, depth + 1], the root first; sampled_from: [B, depth, V]."""
    batch, nodes = tokens.shape
    levels = torch.arange(nodes, device=tokens.device)
    visible = levels[None, :] <= levels[:, None]
    return Proposal(
        tokens=tokens,
        parents=(levels - 1).expand(batch, -1),
        levels=levels,
        visible=visible.expand(batch, -1, -1),
        depth=nodes - 1,
        sampled_from=sampled_from,
    )


class Drafter(RowState):
    """A drafting strategy for one batch."""

    depth: int
    """Number of tokens on its longest path; a round emits at most depth + 1 tokens."""
    nodes: int
    """Number of nodes of a proposal, the root included."""
    kind: Hashable
    """A key that is equal for drafters which launch the same kernels, given the same batch size."""
    plans: tuple[Plan, ...] = ()
    """The plans of method "auto"; empty for other methods."""

    def share(self, rows: slice, sampler: Sampler) -> Self:
        """One for some consecutive rows on the state of this one, which may follow another sampler."""
        raise NotImplementedError

    def refill(self, lengths: Tensor) -> None:
        """Take the newest tokens up to the roots, which rounds of other plans did not feed. lengths: int [B]."""

    def for_plan(self, plan: Plan | None) -> "Drafter":
        """The drafter of a plan, after `reserve`; None for a method without plans."""
        return self

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        """Propose a tree. root: LongTensor [B], the newest token of each row, at position cache.lengths[b]."""
        raise NotImplementedError


class WrappedDrafter(Drafter):
    """A drafter with the state of another one."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.parts = (drafter,)
        self.depth = drafter.depth
        self.nodes = drafter.nodes
        self.kind = (type(self), drafter.kind)
        self.reads_hidden, self.layer_inputs = drafter.reads_hidden, drafter.layer_inputs

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        return self.drafter.propose(root, cache)
