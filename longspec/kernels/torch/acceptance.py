"""Acceptance of a tree's nodes in plain torch, row by row on the host. Only nodes on a row's path cost any work.

Parents precede their children, so one pass in order meets the children of each node of a path.
"""

from __future__ import annotations

import torch
from torch import Tensor


def follow_choices(tokens: Tensor, parents: Tensor, choice: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `Backend.follow_choices`."""
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
    """See `Backend.reject_children`."""
    certain = torch.zeros_like(tokens, dtype=torch.bool) if certain is None else certain
    q_rows = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens) if q_rows is None else q_rows
    paths, residuals = [], []
    for row in range(len(tokens)):
        numbers = (x[row].tolist() for x in (tokens, parents, certain, q_rows))
        nodes, residual = _descend(q[row], p[row], coins[row], *numbers)
        paths.append(nodes)
        residuals.append(residual)
    return *_padded(paths, depth, tokens), torch.stack(residuals)


def _descend(
    q: Tensor, p: Tensor, coins: Tensor, tokens: list[int], parents: list[int], certain: list[bool], q_rows: list[int]
) -> tuple[list[int], Tensor]:
    """The path in one row, and the residual [V] at its last node. q [inner nodes, V]; p [N, V]; coins [N].

    After some children of a node are rejected, with r = ratio:
        residual of p = max(p - r*q, 0) / total
        rest of q     = q without the rejected tokens / mass
    The next rejection subtracts the rest of q from the residual of p, hence r += total / mass. Both sums are computed
    anew each time, because a difference of sums would lose the improbable tokens. The rejection of a certain child
    leaves r as it is. A rejected token is removed from p and q.
    """
    path = [0]
    start = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64, device=p.device)
    ratio, total, mass = start
    own_p, own_q = p[0].clone(), q[0].clone()
    for child, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if parent != path[-1]:
            continue
        rest = 1.0 if certain[child] else own_q[token].double() / mass
        if coins[child] < _residual(own_p[token], own_q[token], ratio) / (rest * total):
            path.append(child)
            ratio, total, mass = start
            # A leaf has no q; any will do.
            own_p, own_q = p[child].clone(), q[min(q_rows[child], len(q) - 1)].clone()
        else:
            own_p[token] = own_q[token] = 0.0
            next_ratio = ratio if certain[child] else ratio + total / mass
            next_total, mass = _sums(_residual(own_p, own_q, next_ratio), own_q)
            # Where p and q agree, rounding can leave an empty residual. Its rejection has probability zero.
            if next_total > 0:
                ratio, total = next_ratio, next_total
    return path, _residual(own_p, own_q, ratio)


def _residual(p: Tensor, q: Tensor, ratio: Tensor) -> Tensor:
    """max(p - ratio * q, 0) elementwise, in fp64."""
    return (p.double() - ratio * q.double()).clamp(min=0)


def _sums(residual: Tensor, remaining: Tensor) -> tuple[Tensor, Tensor]:
    """Sums over the vocabulary of the residual of p and of the rest of q, [V] each -> fp64 scalars."""
    return residual.sum(), remaining.sum(dtype=torch.float64)


def _padded(paths: list[list[int]], depth: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Paths as LongTensor [B, depth + 1], which repeat their last node, and their numbers of steps [B]."""
    padded = [nodes + nodes[-1:] * (depth + 1 - len(nodes)) for nodes in paths]
    return like.new_tensor(padded), like.new_tensor([len(nodes) - 1 for nodes in paths])
