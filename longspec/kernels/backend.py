"""The interface of a backend: the operations of decoding and training on one kind of device.

`kernels.choice` selects one of `torch.backend` (any device and dtype), `triton.backend` (NVIDIA GPUs) and
`native.backend` (CPUs with gcc, in float32). Triton's never waits for the device. Shape letters are those of
CONTRIBUTING.md; n is the number of nodes of one level.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import ClassVar, Protocol

from torch import Tensor

from longspec.kernels.shared.attention import DecodingAttention
from longspec.kernels.shared.residual import ResidualStream
from longspec.kernels.shared.tree import Branches, Draws, LookupState, SelectedNodes, Tree
from longspec.kernels.shared.watch import Watch

OUTSIDE = -(2**31)
"""Label of a token that is not in the draft's vocabulary. Its cross-entropy is not part of the loss."""


class Backend(Protocol):
    """All operations but attention are functions of their arguments alone."""

    name: ClassVar[str]
    """"torch", "triton" or "native"."""
    capturable: ClassVar[bool]
    """Whether a CUDA graph may capture the operations."""
    attention: DecodingAttention

    def __init__(self, attention: DecodingAttention) -> None:
        self.attention = attention

    @staticmethod
    def compiling_only() -> AbstractContextManager[None]:
        """While this is open, calls compile the kernels that they need, many at a time, and launch none.

        Results are undefined, but valid as indices. A backend without such kernels computes as usual.
        """
        return nullcontext()

    # Layers

    @staticmethod
    def embed(table: Tensor, tokens: Tensor) -> Tensor:
        """The rows [B, N, hidden] of a contiguous table [V, hidden] for tokens [B, N]."""

    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias, x contiguous [B, N, in]: [B, N, out]."""

    @staticmethod
    def stream(hidden: Tensor, eps: float) -> ResidualStream:
        """The residual stream of a pass that starts with hidden [B, N, hidden]; eps: that of every RMSNorm."""

    # The vocabulary

    @staticmethod
    def softmax(logits: Tensor, temperature: Tensor | None, watch: Watch | None = None) -> Tensor:
        """softmax(logits / temperature) of logits [B, ..., V], in fp32 or wider; `watch` records faulty rows.

        temperature: fp64 [B]; None is 1.
        """

    @staticmethod
    def log_sum_exp(logits: Tensor) -> Tensor:
        """log sum exp over the last dimension of logits [..., V], in fp32 or wider."""

    @staticmethod
    def argmax(values: Tensor, watch: Watch | None = None) -> Tensor:
        """Index of the largest of values [..., V], the first of equal ones: LongTensor [...].

        watch: records rows without a finite largest value; values are then logits [B, ..., V].
        """

    @staticmethod
    def first_arrival(weights: Tensor, noise: Tensor) -> Tensor:
        """One draw from each distribution proportional to weights [..., V]: LongTensor [...].

        noise: exponential draws of rate 1, fp64, in the shape of weights. Token x arrives at the time
        noise(x) / weights(x), and the first arrival is the draw (exponential clocks).
        """

    @staticmethod
    def row_noise(
        seeds: Tensor,
        positions: Tensor,
        stream: int,
        shape: Sequence[int],
        constant: Tensor | None = None,
        first: int = 0,
    ) -> Tensor:
        """Random numbers, fp64 [B, *shape], that depend on seed, position and stream of their row alone.

        Without `constant` they are uniform in [0, 1), multiples of 2^-53. With it, bool [B], they are exponential of
        rate 1, with a resolution of 2^-53, and 1 in rows where it is True. seeds: LongTensor [B], all 64 bits count.
        positions: int [B], at least 0. stream: distinguishes several draws at one position. first: number of the first
        one, so that the numbers of a stream can be taken in parts. The bits are the same on all backends (see
        `torch.row_noise`).
        """

    @staticmethod
    def terms_and_gradient(
        logits: Tensor, teacher: Tensor | None, labels: Tensor, share: float, norm: Tensor, teacher_norm: Tensor | None
    ) -> Tensor:
        """Loss terms of each of T tokens, [T, 3] in fp32 or wider, summed over one part of the vocabulary; overwrites
        `logits` by the gradient.

        The terms are the cross-entropy of the draft's distribution q with the label, KL(p || q) with the teacher's
        distribution p, and the cross-entropy of p with the label. The gradient is that of
        (1 - share) * cross-entropy + share * KL, or of share * KL for the label OUTSIDE.

        logits, teacher: contiguous [T, V], a part of the vocabulary each, or the whole. norm, teacher_norm: [T], their
        log-sum-exp over the whole vocabulary. labels: LongTensor [T], counted from the first token of the part; they
        may be outside of it. Without a teacher, the second and third term are 0; with share = 0, the second is 0.
        """

    # Trees

    @staticmethod
    def grow_level(
        tree: Tree,
        above: slice,
        width: int,
        logits: Tensor,
        temperature: Tensor | None,
        draws: Draws | None = None,
        watch: Watch | None = None,
        ids: Tensor | None = None,
    ) -> None:
        """Grow the level after `above` by `width` continuations: all pairs of a parent and a token are candidates.

        Without draws, these are the candidates with the most probable paths, best first. With draws, they are sampled
        without replacement, in the order of the draws: each path arrives after an exponential time whose rate is its
        probability; the first child of a parent arrives with the parent, and by the memorylessness of the exponential
        distribution the others follow at independent times (the Gumbel top-k trick on a tree, arXiv 1903.06059). Hence
        the children of one parent, in their order, are draws from its q without replacement, for any number of
        children.

        above: node numbers of the last level. logits [B, n, V]: at each node of that level or, without draws, at its
        first n nodes, which alone get children; divided by temperature, fp64 [B], where None is 1.

        ids: LongTensor [B, C], the token of each column of logits and noise [B, n, C]; None if columns are tokens.
        Columns with a logit other than -inf have distinct tokens. q is then 0 for tokens without a column.
        """

    @staticmethod
    def select_nodes(
        tree: Tree, levels: Tensor, nodes: int, by_arrival: bool, branches: Branches | None = None
    ) -> SelectedNodes:
        """The best `nodes` nodes of a tree of M nodes and its branches.

        levels: LongTensor [M], the depth of the tree's nodes, which are numbered level by level. by_arrival: whether
        the tree was sampled. The branches' nodes are then all selected, and there must be fewer than `nodes` of them. A
        node of the tree with the same path as a branch's node is absorbed by it: it is not selected a second time, and
        its children follow the node of the branch.
        """

    @staticmethod
    def extend_branches(state: LookupState, root: Tensor, lengths: Tensor, sizes: Tensor, prior_weight: float) -> None:
        """Count the hits of the former lookup branches, and replace them by those below a new root, in place.

        root: LongTensor [B], the newest tokens, at positions lengths [B]; written to the history. sizes: LongTensor
        [K], tokens per branch, at most D. K is 1 or 2. prior_weight: number of trials that the priors count as.
        """

    @staticmethod
    def follow_choices(tokens: Tensor, parents: Tensor, choice: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
        """Descend from the root while some child's token is the target's choice at its parent.

        tokens, parents, choice: LongTensor [B, N]; parents precede their children, -1 for no parent. depth: that of the
        tree. Returns the path [B, depth + 1], which repeats its last node, the number of steps [B], and the choice at
        the last node [B], the bonus token.
        """

    @staticmethod
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
        distribution from which the children of each inner node were sampled. p [B, N, V]: the target's distribution.
        coins fp64 [B, N]: uniform in [0, 1). depth: that of the tree. q_rows LongTensor [B, N]: the row of q that
        belongs to each node; None if row i belongs to node i. certain bool [B, N]: nodes that were not drawn from q;
        None for no node.

        Returns the path [B, depth + 1], which repeats its last node, the number of steps [B], and the residual [B, V],
        proportional to the distribution of the bonus token. May overwrite p and q.
        """

    @staticmethod
    def compact(keys: Tensor, values: Tensor, lengths: Tensor, path: Tensor, counts: Tensor) -> None:
        """Move slot lengths[b] + path[b, j] to slot lengths[b] + j for j < counts[b], in place.

        keys, values: contiguous [L, B, K, S, D]. lengths, counts: int [B]. path: int [B, J], increasing from 0.
        """
