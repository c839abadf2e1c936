"""Plain torch references of the acceptance kernels, with their signatures, node by node."""

from __future__ import annotations

from torch import Tensor


def follow_choices(tokens: Tensor, parents: Tensor, choice: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Reference of `descent.follow_choices`."""
    batch = len(tokens)
    path = tokens.new_zeros(batch, depth + 1)
    count = tokens.new_zeros(batch)
    for row in range(batch):
        for step in range(1, depth + 1):
            node = path[row, step - 1]
            matching = ((parents[row] == node) & (tokens[row] == choice[row, node])).nonzero()
            path[row, step] = matching[0, 0] if len(matching) else node
            count[row] += len(matching) > 0
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
    """Reference of `rejection.reject_children`: the recursion itself, p and q normalized after each rejection."""
    batch, nodes = tokens.shape
    path = tokens.new_zeros(batch, depth + 1)
    count = tokens.new_zeros(batch)
    residual = p.new_empty(batch, p.shape[-1])
    for row in range(batch):
        node, level = 0, 0
        p_node, q_node = p[row, 0].double(), q[row, 0].double()
        for child in range(1, nodes):
            if parents[row, child] != node:
                continue
            token = tokens[row, child]
            is_certain = certain is not None and bool(certain[row, child])
            if coins[row, child] < (p_node[token] if is_certain else p_node[token] / q_node[token]):
                node, level = child, level + 1
                path[row, level:] = child
                p_node = p[row, child].double()
                q_row = child if q_rows is None else int(q_rows[row, child])
                q_node = q[row, min(q_row, q.shape[1] - 1)].double()  # a leaf has no q and no children to use it
            elif is_certain:
                p_node, q_node = (x.index_fill(0, token, 0.0) for x in (p_node, q_node))
                p_node, q_node = p_node / p_node.sum(), q_node / q_node.sum()
            else:
                left = (p_node - q_node).clamp(min=0)
                # Rounding can leave nothing where p and q agree; a rejection there has probability zero.
                p_node = left / left.sum() if left.sum() > 0 else p_node
                q_node = q_node.index_fill(0, token, 0.0)
                q_node = q_node / q_node.sum()
        count[row] = level
        residual[row] = p_node
    return path, count, residual
