"""Plain torch references of the kernels that grow a tree, accept its nodes and compact the KV cache.

They have the signatures of the kernels' launchers. Decoding itself runs `argmax`,
`first_arrival`, `grow_level` and `compact` of this file on devices without Triton.
"""

from __future__ import annotations

import torch
from torch import Tensor

from longspec.kernels.decoding.tree import Tree
from longspec.kernels.shared.reference import softmax
from longspec.kernels.shared.watch import Watch


def argmax(values: Tensor, watch: Watch | None = None) -> Tensor:
    """Reference of `row_argmax.argmax`; also takes fp64."""
    largest, index = values.max(-1)
    if watch is not None:
        watch.record(~largest.isfinite())
    return index


def first_arrival(weights: Tensor, noise: Tensor) -> Tensor:
    """Reference of `row_argmax.first_arrival`; also takes fp64."""
    return argmax(weights / noise)


def grow_level(
    tree: Tree,
    above: slice,
    width: int,
    logits: Tensor,
    temperature: float,
    noise: Tensor | None = None,
    q: Tensor | None = None,
    watch: Watch | None = None,
    ids: Tensor | None = None,
) -> None:
    """Reference of `tree_growth.grow_level`."""
    if noise is None or q is None:
        _grow_most_probable(tree, above, width, logits, temperature, watch)
    elif ids is None:
        _grow_sampled(tree, above, width, logits, temperature, noise, q, watch)
    else:
        column_q = q.new_empty(logits.shape)
        _grow_sampled(tree, above, width, logits, temperature, noise, column_q, watch)
        # Columns that do not exist add 0 to their token.
        q.zero_().scatter_add_(2, ids[:, None].expand_as(column_q), column_q)

    if ids is not None:
        level = slice(above.stop, above.stop + width)
        exists = tree.parents[:, level] >= 0
        tree.tokens[:, level] = ids.gather(1, tree.tokens[:, level]).where(exists, 0)


def _grow_most_probable(
    tree: Tree, above: slice, width: int, logits: Tensor, temperature: float, watch: Watch | None
) -> None:
    log_p = (logits.float() / temperature).log_softmax(-1)
    if watch is not None:
        watch.record(log_p[..., 0].isnan())  # a row that defines no distribution is NaN throughout

    # The `width` best of a level are among the `width` best of each parent, which are far fewer than n x V.
    per_parent = min(width, logits.shape[-1])
    best, token = log_p.topk(per_parent, dim=-1)
    score, index = (tree.scores[:, above, None] + best).flatten(1).topk(width, dim=-1)
    tree.enter_level(above, index // per_parent, token.flatten(1).gather(1, index), score, exists=score > -torch.inf)


def _grow_sampled(
    tree: Tree,
    above: slice,
    width: int,
    logits: Tensor,
    temperature: float,
    noise: Tensor,
    q: Tensor,
    watch: Watch | None,
) -> None:
    vocab = logits.shape[-1]
    q.copy_(softmax(logits, temperature, watch))
    scores = tree.scores[:, above, None] + q.double().log()

    # The first child of a parent arrives with the parent, the others after it.
    times = noise / scores.exp()
    arrivals = tree.arrivals[:, above, None] + (times - times.amin(-1, keepdim=True))
    arrivals = arrivals.where(times.isfinite(), torch.inf)

    arrival, index = arrivals.flatten(1).topk(width, dim=-1, largest=False)
    score = scores.flatten(1).gather(1, index)
    tree.enter_level(above, index // vocab, index % vocab, score, exists=arrival.isfinite())
    tree.arrivals[:, above.stop : above.stop + width] = arrival


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
    tokens: Tensor, parents: Tensor, q: Tensor, p: Tensor, coins: Tensor, depth: int
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
            if coins[row, child] < p_node[token] / q_node[token]:
                node, level = child, level + 1
                path[row, level:] = child
                p_node = p[row, child].double()
                q_node = q[row, min(child, q.shape[1] - 1)].double()  # a leaf has no q and no children to use it
            else:
                left = (p_node - q_node).clamp(min=0)
                # Rounding can leave nothing where p and q agree; a rejection there has probability zero.
                p_node = left / left.sum() if left.sum() > 0 else p_node
                q_node = q_node.index_fill(0, token, 0.0)
                q_node = q_node / q_node.sum()
        count[row] = level
        residual[row] = p_node
    return path, count, residual


def compact(keys: Tensor, values: Tensor, lengths: Tensor, path: Tensor, counts: Tensor) -> None:
    """Reference of `compaction.compact`."""
    rows = torch.arange(len(lengths), device=keys.device)[:, None]
    step = torch.arange(path.shape[1], device=keys.device)
    source = lengths[:, None] + torch.where(step < counts[:, None], path, step)
    destination = lengths[:, None] + step
    for store in (keys, values):
        store[:, rows, :, destination] = store[:, rows, :, source]
