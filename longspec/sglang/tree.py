"""Growth of a draft tree in the layout that SGLang's tree builder reads (EAGLE-2, arXiv 2406.16858).

Every expanded node has k candidates as children. Of each level's candidates the k best are expanded, and of all
candidates the best N - 1 are verified, next to the root. Candidates are numbered level by level: k of the root, then
k * k per level, in the order (expanded node, child).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

LEVEL_PENALTY = 1e-4
"""Subtracted per level from log-probabilities, so that a child never ranks before its parent, even at probability 1."""


class Candidates(NamedTuple):
    """Arguments of SGLang's `build_tree_kernel_efficient`; all are LongTensors."""

    parents: Tensor
    """[B, k + 1 + k * (steps - 2)]: -1 and 0 … k - 1, then the numbers of the expanded candidates; [B, 0] for one
    step."""
    chosen: Tensor
    """[B, N - 1]: the numbers of the verified candidates, ascending."""
    tokens: Tensor
    """[B, N - 1]: their tokens."""


def expanded_nodes(topk: int, steps: int) -> int:
    """Number of nodes that the draft reads, the root included."""
    return 1 + topk * (steps - 1)


def most_nodes(topk: int, steps: int) -> int:
    """Number of candidates of the whole tree, the root included."""
    return 1 + topk + topk * topk * (steps - 1)


class GrowingTree:
    """The tree of one round for B requests."""

    def __init__(self, batch: int, topk: int, steps: int, device: torch.device) -> None:
        self.topk = topk
        self.visible = torch.zeros(batch, 1, expanded_nodes(topk, steps), dtype=torch.bool, device=device)
        """bool [B, n, M]: which expanded nodes the n nodes of the newest level see, themselves included."""
        self.visible[:, :, 0] = True
        self.first = 0
        """Number of the newest level's first node among the expanded ones."""
        self.path_scores: Tensor | None = None
        """fp32 [B, k]: scores of the newest level's nodes; None for the root."""
        self.scores: list[Tensor] = []
        self.tokens: list[Tensor] = []
        self.parents: list[Tensor] = []

    def grow(self, log_probabilities: Tensor, tokens: Tensor) -> Tensor:
        """Add the children of the newest level and expand the best of them.

        log_probabilities, tokens: [B, n, k], the k most probable children of each node, most probable first. Returns
        the tokens of the next level, LongTensor [B, k].
        """
        batch, nodes, topk = tokens.shape
        scores = log_probabilities.float() - LEVEL_PENALTY
        tokens = tokens.flatten(1)
        if self.path_scores is None:
            # The root: all its children are expanded, in their order.
            best = torch.arange(topk, device=tokens.device).expand(batch, topk)
            numbers = torch.arange(-1, topk, device=tokens.device).expand(batch, topk + 1)
            scores = scores.flatten(1)
            self.path_scores = scores
        else:
            scores = (self.path_scores[..., None] + scores).flatten(1)
            self.path_scores, best = scores.topk(topk, dim=1)
            numbers = best + sum(level.shape[1] for level in self.tokens)
        self.scores.append(scores)
        self.tokens.append(tokens)
        self.parents.append(numbers)
        self._expand(best // topk, nodes)
        return tokens.gather(1, best)

    def _expand(self, parent: Tensor, nodes: int) -> None:
        """parent: LongTensor [B, k], the nodes of the newest level that the next level's nodes continue."""
        self.first += nodes
        width = self.visible.shape[2]
        self.visible = self.visible.gather(1, parent[..., None].expand(-1, -1, width))
        own = self.first + torch.arange(self.topk, device=parent.device)
        # The children of the last level are never expanded.
        if self.first < width:
            self.visible.scatter_(2, own[None, :, None].expand(len(parent), -1, 1), True)

    def candidates(self, nodes: int) -> Candidates:
        """The best `nodes` - 1 candidates."""
        chosen = torch.cat(self.scores, 1).topk(nodes - 1, dim=1).indices.sort(1).values
        parents = self.parents[:-1] or [chosen[:, :0]]
        return Candidates(torch.cat(parents, 1), chosen, torch.cat(self.tokens, 1).gather(1, chosen))
