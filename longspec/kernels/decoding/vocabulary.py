"""What decoding does over the vocabulary: softmax, argmax, a tree's next level. Triton on CUDA, plain torch elsewhere.

Shape letters: B batch, N nodes of the tree, n nodes of one level, V vocabulary. Nothing here waits for the device.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longspec.kernels.shared.device import runs_triton
from longspec.kernels.shared.watch import Watch


class Tree(NamedTuple):
    """A tree that grows level by level in the same tensors; the root, node 0, is in place."""

    tokens: Tensor
    """LongTensor [B, N]."""
    parents: Tensor
    """LongTensor [B, N]; -1 for the root and for what only fills a level, because no token is left."""
    visible: Tensor
    """bool [B, N, N]: visible[b, i, j] where j is i or an ancestor of i."""
    scores: Tensor
    """[B, N], fp64 for a sampled tree: log-probability of each node's path."""
    arrivals: Tensor
    """fp64 [B, N]: when each node's path arrives; used by sampled trees alone."""


def new_tree(batch: int, nodes: int, sampled: bool, device: torch.device) -> Tree:
    """A tree of a root and nodes that are still to grow."""
    shape = (batch, nodes)
    return Tree(
        torch.zeros(shape, dtype=torch.long, device=device),
        torch.full(shape, -1, dtype=torch.long, device=device),
        torch.eye(nodes, dtype=torch.bool, device=device).repeat(batch, 1, 1),
        torch.zeros(shape, dtype=torch.float64 if sampled else torch.float32, device=device),
        torch.zeros(shape, dtype=torch.float64, device=device),
    )


def probabilities(logits: Tensor, temperature: float, watch: Watch | None = None) -> Tensor:
    """The softmax of logits [B, ..., V] / temperature in fp32 or wider; `watch` records rows that have none."""
    if not runs_triton(logits):
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        p = (wide / temperature).softmax(-1)
        if watch is not None:
            watch.record(p[..., 0].isnan())  # one NaN makes the whole row NaN
        return p
    from longspec.kernels.shared.logit_statistics import logit_statistics, softmax

    logits = logits.contiguous()
    return softmax(logit_statistics(logits, temperature), logits, temperature, watch)


def argmax(values: Tensor, noise: Tensor | None = None, watch: Watch | None = None) -> Tensor:
    """Place of the largest of values [..., V], or of values / noise (fp64, the same shape): LongTensor [...].

    With `watch`, values are logits [B, ..., V]; rows that define no distribution are recorded.
    """
    if runs_triton(values):
        from longspec.kernels.decoding import row_argmax

        return row_argmax.argmax(values, noise, watch)
    best, place = (values if noise is None else values / noise).max(-1)
    if watch is not None:
        watch.record(~best.isfinite())
    return place


def best_children(
    tree: Tree, above: slice, width: int, logits: Tensor, temperature: float, watch: Watch | None = None
) -> None:
    """Grow the level after `above` (numbers of the last one's n nodes) by the `width` most probable continuations over
    all parents × vocabulary, best first. logits: [B, n, V], divided by the temperature."""
    if runs_triton(logits):
        from longspec.kernels.decoding import tree_growth

        if tree_growth.fits(logits, width):
            return tree_growth.grow_level(*tree, above, width, logits, temperature, watch=watch)
    # A level's best `width` are among the best `width` of each parent, which are far fewer than parents × V.
    log_p = (logits.float() / temperature).log_softmax(-1)
    if watch is not None:
        watch.record(log_p[..., 0].isnan())  # one NaN makes the whole row NaN
    each = min(width, logits.shape[-1])
    best, token = log_p.topk(each, dim=-1)
    score, index = (tree.scores[:, above, None] + best).flatten(1).topk(width, dim=-1)
    _plant(tree, above, index // each, token.flatten(1).gather(1, index), score, exists=score > -torch.inf)


def sampled_children(
    tree: Tree,
    above: slice,
    width: int,
    logits: Tensor,
    temperature: float,
    noise: Tensor,
    q: Tensor,
    watch: Watch | None = None,
) -> None:
    """Grow the level after `above` by `width` continuations sampled without replacement over all parents × vocabulary,
    in the order of the draws, and write the distributions that they are drawn from to `q`.

    It is a race: each path arrives after an exponential time whose rate is its probability, a parent with the first of
    its children; the others follow memorylessly. (The Gumbel top-k trick on a tree, arXiv 1903.06059.) Hence a
    parent's children are, in their order, draws from its q without replacement, however many of them are kept.

    logits [B, n, V], divided by the temperature; noise fp64 [B, n, V]: exponential draws of rate 1 (fp32 ones are too
    coarse near 0 for a large vocabulary: on CUDA none is below 6e-8); q fp32 [B, n, V], rows contiguous.
    """
    if runs_triton(logits):
        from longspec.kernels.decoding import tree_growth

        if tree_growth.fits(logits, width):
            return tree_growth.grow_level(*tree, above, width, logits, temperature, noise, q, watch)
    vocab = logits.shape[-1]
    scores = tree.scores[:, above, None] + q.copy_(probabilities(logits, temperature, watch)).double().log()
    times = noise / scores.exp()
    arrivals = tree.arrivals[:, above, None] + (times - times.amin(-1, keepdim=True))
    arrivals = arrivals.where(times.isfinite(), torch.inf)
    arrival, index = arrivals.flatten(1).topk(width, dim=-1, largest=False)
    exists = arrival.isfinite()
    _plant(tree, above, index // vocab, index % vocab, scores.flatten(1).gather(1, index), exists)
    tree.arrivals[:, above.stop : above.stop + width] = arrival


def _plant(tree: Tree, above: slice, parent: Tensor, token: Tensor, score: Tensor, exists: Tensor) -> None:
    """Enter a level into the tree. All [B, width]; parent: number within the level above."""
    here = slice(above.stop, above.stop + token.shape[1])
    node = parent + above.start
    rows = torch.arange(len(token), device=token.device)[:, None]
    itself = torch.eye(tree.tokens.shape[1], dtype=torch.bool, device=token.device)[here]
    tree.tokens[:, here] = token.where(exists, 0)
    tree.parents[:, here] = node.where(exists, -1)
    tree.scores[:, here] = score.where(exists, -torch.inf)
    tree.visible[:, here] = tree.visible[rows, node] & exists[..., None] | itself
