"""Proposals, which drafters pass to verification, and the base of all drafters."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from longspec.inference.adaptive.plans import Plan
from longspec.inference.cache import TargetCache
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
    """LongTensor [B, N]: the row of `sampled_from` that belongs to each node; leaves have numbers from R on.
    None: row i belongs to node i."""
    from_lookup: Tensor | None = None
    """bool [B, N]: nodes from prompt lookup. They are proposed without chance, whatever q says, and each has a lower
    number than its sampled siblings. None: no node."""
    ranks: Tensor | None = None
    """LongTensor [B, N]: the nodes in the order in which smaller budgets would keep them, 0 for the root. None for a
    tree whose nodes were not selected."""

    def levels_by_rank(self) -> Tensor:
        """LongTensor [B, N]: the number of levels that the draft has to grow for the node of each rank, 0 for the root
        and for nodes from prompt lookup."""
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


class DraftState:
    """The state of a drafting strategy for one batch. Its methods use tensor operations of static shape, so that they
    can be captured in a CUDA graph. Without its own implementation a method does nothing."""

    depth: int
    """Number of tokens on its longest path; a round emits at most depth + 1 tokens."""
    nodes: int
    """Number of nodes of a proposal, the root included."""
    kind: Hashable
    """A key that is equal for drafters which launch the same kernels, given the same batch size."""
    reads_hidden: bool = False
    """Whether `propose` reads `TargetCache.newest_hidden`."""
    layer_inputs: tuple[int, ...] = ()
    """Layers of the target whose inputs the draft reads: `feed` gets those at accepted tokens, and `feed_prompt` those
    at the prompt's."""
    plans: tuple[Plan, ...] = ()
    """The plans of method "auto"; empty for other methods."""

    def reserve(self, capacity: int) -> None:
        """Allocate state for positions 0 ... capacity - 1. The engine calls it before any other method."""

    def share(self, rows: slice, sampler: Sampler) -> Self:
        """One for some consecutive rows on the state of this one, which may follow another sampler."""
        raise NotImplementedError

    def start(self, prompts: Tensor, lengths: Tensor) -> None:
        """Read the prompts. prompts: LongTensor [B, P], padded on the right; lengths: LongTensor [B]."""

    def feed_prompt(self, tokens: Tensor, positions: Tensor, valid: Tensor, states: Tensor) -> None:
        """Take a chunk of the prompts, before `start`, if `layer_inputs` has any. Arguments as in `Drafter.feed`."""

    def row_states(self) -> list[Tensor]:
        """All tensors [B, ...] that hold state of the rows, as views: copying a row of each moves a row's draft."""
        return []

    def refill(self, lengths: Tensor) -> None:
        """Take the newest tokens up to the roots, which rounds of other plans did not feed. lengths: int [B]."""

    def for_plan(self, plan: Plan | None) -> Drafter:
        """The drafter of a plan, after `reserve`; None for a method without plans."""
        raise NotImplementedError


class Drafter(DraftState):
    """A drafting strategy."""

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        """Propose a tree. root: LongTensor [B], the newest token of each row, at position cache.lengths[b]."""
        raise NotImplementedError

    def feed(self, tokens: Tensor, positions: Tensor, valid: Tensor, states: Tensor | None = None) -> None:
        """Take accepted tokens, in order of position: each token exactly once.

        tokens, positions: LongTensor [B, depth + 1]; valid: bool [B, depth + 1], False for entries to be ignored.
        states: [B, depth + 1, n · hidden], what the target's n layers `layer_inputs` read at these tokens.
        """

    def for_plan(self, plan: Plan | None) -> Drafter:
        return self


class WrappedDrafter(Drafter):
    """A drafter with the state of another one."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter = drafter
        self.depth = drafter.depth
        self.nodes = drafter.nodes
        self.kind = (type(self), drafter.kind)
        self.reads_hidden, self.layer_inputs = drafter.reads_hidden, drafter.layer_inputs

    def reserve(self, capacity: int) -> None:
        self.drafter.reserve(capacity)

    def start(self, prompts: Tensor, lengths: Tensor) -> None:
        self.drafter.start(prompts, lengths)

    def feed(self, tokens: Tensor, positions: Tensor, valid: Tensor, states: Tensor | None = None) -> None:
        more = () if states is None else (states,)  # a drafter of the user's own need not know the argument
        self.drafter.feed(tokens, positions, valid, *more)

    def row_states(self) -> list[Tensor]:
        return self.drafter.row_states()

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        return self.drafter.propose(root, cache)
