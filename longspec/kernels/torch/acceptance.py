"""Acceptance of a tree's nodes in plain torch, row by row on the host. Only nodes on a row's path cost any work.

Parents precede their children, so one pass in order meets the children of each node of a path.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

START = (np.float64(0), np.float64(1), np.float64(1))
"""ratio, total and mass at a node without rejected children."""


def follow_choices(tokens: Tensor, parents: Tensor, choice: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Descend from the root while some child's token is the target's choice at its parent.

    tokens, parents, choice: LongTensor [B, N]; parents precede their children, -1 for no parent. depth: that of the
    tree. Returns the path [B, depth + 1], which repeats its last node, the number of steps [B], and the choice at the
    last node [B], the bonus token.
    """
    paths = []
    for row_tokens, row_parents, row_choice in zip(tokens.tolist(), parents.tolist(), choice.tolist(), strict=True):
        nodes = [0]
        for child, parent in enumerate(row_parents):
            if parent == nodes[-1] and row_tokens[child] == row_choice[parent]:
                nodes.append(child)
        paths.append(nodes)
    path, count = _padded(paths, depth, tokens)
    return path, count, choice.gather(1, path[:, -1:])[:, 0]


def reject_children(
    tokens: Tensor,
    parents: Tensor,
    q: Tensor,
    p: Tensor,
    coins: Tensor,
    depth: int,
    q_rows: Tensor | None = None,
    certain: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Descend from the root to the first child that passes, as long as there is one (see `inference.acceptance`).

    tokens, parents: LongTensor [B, N]; parents precede their children, -1 for no parent. q [B, inner nodes, V]: the
    distribution from which the children of each inner node were sampled. p [B, N, V]: the target's distribution. coins
    fp64 [B, N]: uniform in [0, 1). depth: that of the tree. q_rows LongTensor [B, N]: the row of q that belongs to each
    node; None if row i belongs to node i. certain bool [B, N]: nodes that were not drawn from q; None for no node.

    Returns the path [B, depth + 1], which repeats its last node, the number of steps [B], and the residual [B, V],
    proportional to the distribution of the bonus token. May overwrite p and q.
    """
    certain = torch.zeros_like(tokens, dtype=torch.bool) if certain is None else certain
    q_rows = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens) if q_rows is None else q_rows
    lists = zip(*(x.tolist() for x in (tokens, parents, certain, q_rows)), strict=True)
    with np.errstate(divide="ignore", invalid="ignore"):  # as in torch, NaN in p ends a path
        rows = [_descend(q[row], p[row], coins[row], *numbers) for row, numbers in enumerate(lists)]
    paths, residuals = zip(*rows, strict=True)
    return *_padded(paths, depth, tokens), torch.from_numpy(np.stack(residuals)).to(p.device)


def _descend(
    q: Tensor, p: Tensor, coins: Tensor, tokens: list[int], parents: list[int], certain: list[bool], q_rows: list[int]
) -> tuple[list[int], np.ndarray]:
    """The path in one row, and the residual [V] at its last node. q [inner nodes, V]; p [N, V]; coins [N].

    After some children of a node are rejected, with r = ratio:
        residual of p = max(p - r*q, 0) / total
        rest of q     = q without the rejected tokens / mass
    The next rejection subtracts the rest of q from the residual of p, hence r += total / mass. Both sums are computed
    anew each time, because a difference of sums would lose the improbable tokens. The rejection of a certain child
    leaves r as it is. A rejected token is removed from p and q.
    """
    path, (ratio, total, mass) = [0], START
    own_p, own_q = _on_host(p[0]), _on_host(q[0])
    for child, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent != path[-1]:
            continue
        rest = 1.0 if certain[child] else own_q[token] / mass
        if coins[child] < _residual(own_p[token], own_q[token], ratio) / (rest * total):
            path.append(child)
            ratio, total, mass = START
            # A leaf has no q; any will do.
            own_p, own_q = _on_host(p[child]), _on_host(q[min(q_rows[child], len(q) - 1)])
        else:
            own_p[token] = own_q[token] = 0.0
            next_ratio = ratio if certain[child] else ratio + total / mass
            next_total, mass = _sums(_residual(own_p, own_q, next_ratio), own_q)
            # Where p and q agree, rounding can leave an empty residual. Its rejection has probability zero.
            if next_total > 0:
                ratio, total = next_ratio, next_total
    return path, _residual(own_p, own_q, ratio)


def _residual(p: Any, q: Any, ratio: np.float64) -> Any:
    """max(p - ratio * q, 0) elementwise."""
    return np.maximum(p - ratio * q, 0.0)


def _sums(residual: np.ndarray, remaining: np.ndarray) -> tuple[np.float64, np.float64]:
    """Sums over the vocabulary of the residual of p and of the rest of q, [V] each."""
    return residual.sum(), remaining.sum()


def _on_host(probabilities: Tensor) -> np.ndarray:
    """A copy in fp64."""
    return probabilities.cpu().numpy().astype(np.float64)


def _padded(paths: Sequence[list[int]], depth: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Paths as LongTensor [B, depth + 1], which repeat their last node, and their numbers of steps [B]."""
    padded = [nodes + nodes[-1:] * (depth + 1 - len(nodes)) for nodes in paths]
    return like.new_tensor(padded), like.new_tensor([len(nodes) - 1 for nodes in paths])
