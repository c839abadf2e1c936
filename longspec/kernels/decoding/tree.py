"""The tree of proposed tokens that a draft grows level by level."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Tree(NamedTuple):
    """A tree of N nodes per sequence, numbered level by level from the root, node 0; growth writes into its tensors.

    Where a level has fewer possible tokens than nodes, the remaining nodes are padding.
    """

    tokens: Tensor
    """LongTensor [B, N]; 0 for padding."""
    parents: Tensor
    """LongTensor [B, N]; -1 for the root and for padding."""
    visible: Tensor
    """bool [B, N, N]: visible[b, i, j] if j is i or an ancestor of i."""
    scores: Tensor
    """Log-probability of the path to each node, [B, N]; fp64 for a sampled tree, else fp32. -inf for padding."""
    arrivals: Tensor
    """Arrival time of the path to each node, fp64 [B, N]; used by sampled trees only."""

    def enter_level(self, above: slice, parent: Tensor, token: Tensor, score: Tensor, exists: Tensor) -> None:
        """Write the level after the nodes `above`.

        All arguments are [B, width]: parent counts from the first node of `above`; exists is False for padding.
        """
        level = slice(above.stop, above.stop + token.shape[1])
        node = parent + above.start
        rows = torch.arange(len(token), device=token.device)[:, None]
        itself = torch.eye(self.tokens.shape[1], dtype=torch.bool, device=token.device)[level]
        self.tokens[:, level] = token.where(exists, 0)
        self.parents[:, level] = node.where(exists, -1)
        self.scores[:, level] = score.where(exists, -torch.inf)
        self.visible[:, level] = self.visible[rows, node] & exists[..., None] | itself


def new_tree(batch: int, nodes: int, sampled: bool, device: torch.device) -> Tree:
    """A tree with a root and room for `nodes` nodes."""
    shape = (batch, nodes)
    return Tree(
        tokens=torch.zeros(shape, dtype=torch.long, device=device),
        parents=torch.full(shape, -1, dtype=torch.long, device=device),
        visible=torch.eye(nodes, dtype=torch.bool, device=device).repeat(batch, 1, 1),
        scores=torch.zeros(shape, dtype=torch.float64 if sampled else torch.float32, device=device),
        arrivals=torch.zeros(shape, dtype=torch.float64, device=device),
    )
