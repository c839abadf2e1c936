"""The tree of proposed tokens that a draft grows level by level."""

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
        """Write the level after the nodes `above`. All arguments are [B, width]: parent counts from the first node of
        `above`; exists is False for padding."""
        level = slice(above.stop, above.stop + token.shape[1])
        node = parent + above.start
        rows = torch.arange(len(token), device=token.device)[:, None]
        itself = torch.eye(self.tokens.shape[1], dtype=torch.bool, device=token.device)[level]
        self.tokens[:, level] = token.where(exists, 0)
        self.parents[:, level] = node.where(exists, -1)
        self.scores[:, level] = score.where(exists, -torch.inf)
        self.visible[:, level] = self.visible[rows, node] & exists[..., None] | itself


class Draws(NamedTuple):
    """What the children of n nodes are drawn with, and from."""

    noise: Tensor
    """Exponential draws of rate 1, fp64 [B, n, C]. fp32 draws are too coarse near 0 for a large vocabulary (on CUDA
    none is below 6e-8)."""
    q: Tensor
    """fp32 [B, n, V] with contiguous rows; growth writes the distributions to it."""


class Branches(NamedTuple):
    """K chains below the root of each sequence, with distinct first tokens, that may be verified next to a tree."""

    tokens: Tensor
    """LongTensor [B, K, D]: the tokens at depths 1 ... D of each chain."""
    scores: Tensor
    """fp32 [B, K, D]: estimated log-probability of the path to each node, not increasing with depth; -inf from the
    first node on that does not exist."""


class LookupState(NamedTuple):
    """State of lookup branches: continuations of earlier occurrences of the newest tokens. S positions per sequence, K
    branches of up to D tokens, matches of 1 to M tokens."""

    history: Tensor
    """LongTensor [B, S]: the token at each position, up to the root's."""
    hits: Tensor
    """fp32 [B, M]: number of tokens that followed a match of each length as proposed; longer matches count as M."""
    trials: Tensor
    """fp32 [B, M]: number of tokens proposed after a match of each length, given that those before them were right."""
    priors: Tensor
    """fp32 [M]: the share of hits that is expected before any trial."""
    tokens: Tensor
    """LongTensor [B, K, D]: the newest branches."""
    scores: Tensor
    """fp32 [B, K, D]: their scores, as in `Branches`."""
    match_lengths: Tensor
    """LongTensor [B, K]: the length of the match that each of them follows; 0 for no branch."""
    roots: Tensor
    """LongTensor [B]: position of the root below which they were proposed."""


class SelectedNodes(NamedTuple):
    """The N selected nodes of a tree and its branches: the root, then nodes of branches, then nodes of the tree, each
    in their own order. If fewer nodes exist, the rest is padding."""

    tokens: Tensor
    """LongTensor [B, N]."""
    parents: Tensor
    """LongTensor [B, N]: lower than the node's own number; -1 for the root and for padding."""
    levels: Tensor
    """LongTensor [B, N]: depth of each node."""
    visible: Tensor
    """bool [B, N, N]: visible[b, i, j] if j is i or an ancestor of i."""
    wide: Tensor
    """LongTensor [B, N]: the number of each node in the tree; 0 for a node of a branch that the tree does not contain,
    too."""
    ranks: Tensor
    """LongTensor [B, N]: the node's place in the order of selection, 0 for the root. The nodes of rank below n are
    those that a selection of n nodes would hold."""
    in_branch: Tensor
    """bool [B, N]: whether the node belongs to a branch."""


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
