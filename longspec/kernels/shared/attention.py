"""The interface of decoding attention: the methods of a backend and the types that its kernels exchange.

Shape letters are those of CONTRIBUTING.md; W is the window of the draft, M the number of nodes of its tree so far.
q is [B, H, N, D]; k and v are [B, K, S, D] with a contiguous last dimension; outputs are [B, H, N, D] in q's dtype.
`lengths` is int [B]: the prefix of sequence b is in slots 0 … lengths[b] - 1. A query that sees no key gets 0.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple, Protocol

from torch import Tensor

from longspec.kernels.shared.residual import HeadNorms, TokenSlots

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Attention of one layer of a verification pass: (q [B, H, N, D], k, v [B, K, S, D], scale) -> [B, H, N, D]."""


class AttendToken(ABC):
    """An `Attend` of passes of one token per sequence that can also start from their merged projections."""

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor: ...

    @abstractmethod
    def project(self, qkv: Tensor, slots: TokenSlots, norms: HeadNorms | None, scale: float) -> Tensor:
        """`ResidualStream.rotate_and_store`, then attention: [B, 1, H·D].

        qkv: contiguous [B, 1, (H + 2K)·D]. slots: without `rows`, so that sequence b is in row b of the cache.
        """


class PrefixParts(NamedTuple):
    """Attention states over P parts of the prefix, together slots 0 … lengths[b] // block * block - 1 of sequence b."""

    outs: Tensor
    """Attention output of each part, [P, B, H, N, D]."""
    lses: Tensor
    """Natural-log LSE of each part, fp32 [P, B, H, N]; -inf for an empty part, whose output may hold anything."""
    block: int
    """Number of slots per block; parts consist of whole blocks."""
    overlap: bool
    """Whether the kernel that writes the parts lets the next kernel start early (programmatic dependent launch)."""


class PagedPrefix(NamedTuple):
    """The prefixes of B sequences in a pool."""

    keys: Tensor
    """[slots, K, D] with a contiguous last dimension, like `values`"""
    values: Tensor
    slots: Tensor
    """int, one dimension: the prefix of sequence b is in slots[begins[b]] … slots[ends[b] - 1]"""
    begins: Tensor
    """int [B], like `ends`"""
    ends: Tensor


class PagedTree(NamedTuple):
    """The N nodes after each prefix, which the queries see under a mask."""

    keys: Tensor
    """[B * N, K, D], like `values`"""
    values: Tensor
    mask: Tensor
    """bool or uint8, one dimension: entry (i, j) of sequence b, in row i of n + N entries, is at
    mask_starts[b] + i * (n + N) + n + j, where n is the length of the prefix; entries of the prefix are not read."""
    mask_starts: Tensor
    """int [B]"""


class DecodingAttention(Protocol):
    """A backend. Slots after the used ones may hold anything, NaN included, without effect on a result."""

    name: str
    """Kernels that read the prefix: "flash", "triton", "native", "sdpa" or "deterministic"."""
    capturable: bool
    """Whether a CUDA graph may capture the calls, because no value of `lengths` is read on the host."""

    def hybrid(self, lengths: Tensor, tree_mask: Tensor) -> Attend:
        """Attention of a verification pass, to be called once per layer: each query sees the whole prefix of its
        sequence and, under `tree_mask`, nodes of the tree.

        The keys of the M nodes are already in slots lengths[b] … lengths[b] + M - 1. tree_mask is bool [B, N, M], True
        where query i sees key node j; the queries of a verification pass are the M nodes. (LongSpec, arXiv 2502.17421:
        hybrid tree attention.)
        """

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
        """The draft's cross-attention: each query sees the whole prefix of its sequence, which may be empty."""

    def window(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, level: int, tree_mask: Tensor, scale: float
    ) -> Tensor:
        """The draft's self-attention: N nodes of one level see a ring buffer of accepted tokens and nodes of the tree.

        k and v [B, K, W + M, D] are finite. Slot s < W holds the newest position p < lengths[b] with p % W == s, and
        slot W + j holds node j. The queries are at position lengths[b] + level. They see position p if p >= 0 and
        p >= lengths[b] + level - W, and node j where tree_mask, bool [B, N, M], is True.
        """

    def masked(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        """Attention to all S slots, which are finite, where mask, bool [B, N, S], is True."""

    def chunk(self, rows: Tensor, ends: Tensor) -> Attend | None:
        """Causal attention of a captured pass over N more tokens of n sequences, to be called once per layer. None if
        the backend has no kernel for it.

        rows, ends: int32 [n]. Sequence b is in row rows[b] of the cache k, v [B, K, S, D], which is finite. The keys of
        its N tokens are already in slots ends[b] - N … ends[b] - 1; slots beyond S must not be needed.
        """
        return None

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """Causal attention of a chunk of the prompt: the N queries belong to the last N of the S slots."""
