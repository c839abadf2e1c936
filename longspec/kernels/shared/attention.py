"""The types that the kernels of decoding attention exchange. Shape letters are those of CONTRIBUTING.md."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]
"""Attention of one layer of a verification pass: (q [B, H, N, D], k, v [B, K, S, D], scale) -> [B, H, N, D].
That of a pass of one token per sequence may have a method `project` (see `triton.attention`), which starts from the
merged projections."""


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
