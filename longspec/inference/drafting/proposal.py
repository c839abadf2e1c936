"""What a draft hands to verification, and what a drafting strategy is."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from longspec.inference.cache import TargetCache


@dataclass
class Proposal:
    """A tree of N nodes for every row; node 0 is the root, the newest token, which the target has not read yet."""

    tokens: Tensor
    """LongTensor [B, N]."""
    parents: Tensor
    """LongTensor [B, N]: parents come before their children; -1 for the root, and for what only fills a level because
    the draft's distribution has run out of tokens."""
    levels: Tensor
    """LongTensor [N]: a node's depth, 0 for the root; the same for every row."""
    visible: Tensor
    """bool [B, N, N]: visible[b, i, j] where j is i or an ancestor of i."""
    shape: tuple[int, ...]
    """Nodes of each level below the root; they are numbered level by level."""
    sampled_from: Tensor | None = None
    """[B, N - shape[-1], V]: the distribution q that each inner node's children were sampled from without replacement,
    in the order of their numbers; None for a proposal built without chance."""

    @property
    def depth(self) -> int:
        return len(self.shape)


def chain(tokens: Tensor, sampled_from: Tensor | None = None) -> Proposal:
    """A tree without branches: tokens LongTensor [B, depth + 1], the root first; sampled_from [B, depth, V]."""
    batch, nodes = tokens.shape
    levels = torch.arange(nodes, device=tokens.device)
    visible = levels[None, :] <= levels[:, None]
    return Proposal(
        tokens,
        (levels - 1).expand(batch, -1),
        levels,
        visible.expand(batch, -1, -1),
        (1,) * (nodes - 1),
        sampled_from,
    )


class Drafter(Protocol):
    """A drafting strategy. The engine calls `feed` with every token that becomes certain, in order of position."""

    depth: int
    """Most tokens it proposes on one path; a round emits at most depth + 1."""
    nodes: int
    """Tokens that one verification reads, the root included."""
    kind: Hashable
    """Drafters of one kind, for as many rows, launch the same kernels."""
    reads_hidden: bool
    """Whether `propose` reads the target's hidden states in `TargetCache.newest_hidden`."""

    def start(self, prompts: Tensor, lengths: Tensor) -> None:
        """prompts: LongTensor [B, P], padded right; lengths: LongTensor [B]."""

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        """root: LongTensor [B], the newest token of each row, at position cache.lengths[b]."""

    def feed(self, tokens: Tensor, positions: Tensor, valid: Tensor) -> None:
        """tokens, positions: LongTensor [B, depth + 1]; only where valid (bool) do they count."""
