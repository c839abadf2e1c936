"""Decoding's operations over the vocabulary and on trees: softmax, argmax, growth, selection. Triton on CUDA, plain
torch elsewhere.

Shape letters are those of CONTRIBUTING.md; n is the number of nodes of one level. Nothing here waits for the device.
Triton is imported where it runs, because a machine without a GPU may lack it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from longspec.kernels.decoding import lookup_reference, tree_reference
from longspec.kernels.decoding.tree import Branches, LookupState, SelectedNodes, Tree
from longspec.kernels.shared import reference
from longspec.kernels.shared.device import runs_triton
from longspec.kernels.shared.watch import Watch


def probabilities(logits: Tensor, temperature: Tensor | None, watch: Watch | None = None) -> Tensor:
    """softmax(logits / temperature) of logits [B, ..., V], in fp32 or wider; `watch` records faulty rows.

    temperature: fp64 [B]; None is 1.
    """
    if not runs_triton(logits):
        return reference.softmax(logits, temperature, watch)
    from longspec.kernels.shared.logit_statistics import softmax

    return softmax(logits.contiguous(), temperature, watch)


def log_sum_exp(logits: Tensor) -> Tensor:
    """log sum exp over the last dimension of logits [..., V], in fp32 or wider."""
    if not runs_triton(logits):
        return reference.log_sum_exp(logits)
    from longspec.kernels.shared import logit_statistics

    return logit_statistics.log_sum_exp(logits.contiguous())


def argmax(values: Tensor, watch: Watch | None = None) -> Tensor:
    """Index of the largest of values [..., V], the first of equal ones: LongTensor [...].

    watch: records rows without a finite largest value; values are then logits [B, ..., V].
    """
    if not runs_triton(values):
        return tree_reference.argmax(values, watch)
    from longspec.kernels.decoding import row_argmax

    return row_argmax.argmax(values, watch)


def first_arrival(weights: Tensor, noise: Tensor) -> Tensor:
    """One draw from each distribution proportional to weights [..., V]: LongTensor [...].

    noise: exponential draws of rate 1, fp64, in the shape of weights. Token x arrives at the time
    noise(x) / weights(x), and the first arrival is the draw (an exponential race).
    """
    if not runs_triton(weights):
        return tree_reference.first_arrival(weights, noise)
    from longspec.kernels.decoding import row_argmax

    return row_argmax.first_arrival(weights, noise)


def best_children(
    tree: Tree,
    above: slice,
    width: int,
    logits: Tensor,
    temperature: Tensor | None,
    watch: Watch | None = None,
    ids: Tensor | None = None,
) -> None:
    """Grow the level after `above` by the `width` most probable continuations, best first.

    above: node numbers of the last level. logits [B, n, V]: at each node of that level; divided by
    temperature, fp64 [B], where None is 1.
    Candidates are all pairs of a parent and a token; they are ordered by the log-probability of their whole path.

    ids: LongTensor [B, C], the token of each column of logits [B, n, C]; None if columns are tokens. Columns with a
    logit other than -inf have distinct tokens.
    """
    grow_level = _grow_level(logits, width)
    grow_level(tree, above, width, logits, temperature, watch=watch, ids=ids)


def sampled_children(
    tree: Tree,
    above: slice,
    width: int,
    logits: Tensor,
    temperature: Tensor | None,
    noise: Tensor,
    q: Tensor,
    watch: Watch | None = None,
    ids: Tensor | None = None,
) -> None:
    """Grow the level after `above` by `width` continuations sampled without replacement, in the order of the draws, and
    write the distributions from which they are drawn to `q`.

    Candidates are all pairs of a parent and a token. Each path arrives after an exponential time whose rate is its
    probability; the first child of a parent arrives with the parent, and by the memorylessness of the exponential
    distribution the others follow at independent times (the Gumbel top-k trick on a tree, arXiv 1903.06059). Hence the
    children of one parent, in their order, are draws from its q without replacement, for any number of children.

    logits [B, n, V], temperature: as in `best_children`. noise fp64 [B, n, V]: exponential draws of rate 1; fp32 draws
    are too coarse near 0 for a large vocabulary (on CUDA none is below 6e-8). q fp32 [B, n, V] with contiguous rows.

    ids: as in `best_children`. Logits and noise are then [B, n, C], and q is 0 for tokens without a column.
    """
    grow_level = _grow_level(logits, width)
    grow_level(tree, above, width, logits, temperature, noise, q, watch, ids)


def select_nodes(
    tree: Tree, levels: Tensor, nodes: int, by_arrival: bool, branches: Branches | None = None
) -> SelectedNodes:
    """The best `nodes` nodes of a tree and its branches; see `node_selection.select_nodes`."""
    if runs_triton(tree.tokens):
        from longspec.kernels.decoding import node_selection

        if node_selection.fits(tree, branches):
            return node_selection.select_nodes(tree, levels, nodes, by_arrival, branches)
    return tree_reference.select_nodes(tree, levels, nodes, by_arrival, branches)


def extend_branches(state: LookupState, root: Tensor, lengths: Tensor, sizes: Tensor, prior_weight: float) -> None:
    """Count the hits of the former lookup branches, and find new ones; see `lookup_branches.extend_branches`."""
    if runs_triton(root):
        from longspec.kernels.decoding import lookup_branches

        lookup_branches.extend_branches(state, root, lengths, sizes, prior_weight)
    else:
        lookup_reference.extend_branches(state, root, lengths, sizes, prior_weight)


def _grow_level(logits: Tensor, width: int) -> Callable[..., None]:
    """The kernel if it runs here and takes these sizes, else its reference."""
    if runs_triton(logits):
        from longspec.kernels.decoding import tree_growth

        if tree_growth.fits(logits, width):
            return tree_growth.grow_level
    return tree_reference.grow_level
