"""Decoding attention on our Triton kernels: a prefix kernel, then a kernel for the tree that merges both results.

Grids and the number of splits follow from shapes and the device alone, and lengths stay on the device, so each call may
be captured in a CUDA graph and replayed at other lengths.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
from torch import Tensor

from longspec.kernels.shared.attention import Attend, PagedPrefix, PagedTree, PrefixParts
from longspec.kernels.shared.device import describe_gpu
from longspec.kernels.shared.residual import HeadNorms, TokenSlots
from longspec.kernels.torch.attention import DecodingAttention
from longspec.kernels.triton.attention_tiles import (
    Tiles,
    count_parts,
    count_splits,
    prefix_tiles,
    programs_at_once,
    tree_attention_tiles,
)
from longspec.kernels.triton.chunk_attention import chunk_attention
from longspec.kernels.triton.paged_attention import paged_attention
from longspec.kernels.triton.prefix_attention import prefix_attention
from longspec.kernels.triton.token_attention import token_attention
from longspec.kernels.triton.tree_attention import masked_attention, prefix_and_tree_attention, window_attention

PrefixPass = Callable[[Tensor, Tensor, Tensor, float], PrefixParts]
"""The prefix kernel for one layer: (q, k, v, scale) -> the states of attention to parts of the prefix."""


class TritonAttention(DecodingAttention):
    """Decoding attention on our own kernels; prefill that is not captured on torch's."""

    name = "triton"
    capturable = True

    def hybrid(self, lengths: Tensor, tree_mask: Tensor) -> Attend:
        attend_to_prefix = self.prefix_pass(lengths)

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            parts = attend_to_prefix(q, k, v, scale)
            return prefix_and_tree_attention(q, k, v, lengths, tree_mask, scale, parts)

        if tree_mask.shape[1:] == (1, 1):
            return _OneToken(attend, lengths)
        return attend

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
        # Without a tree the second kernel still reads the slots after the last whole block and merges the parts.
        parts = self.prefix_pass(lengths)(q, k, v, scale)
        return prefix_and_tree_attention(q, k, v, lengths, None, scale, parts)

    window = staticmethod(window_attention)
    masked = staticmethod(masked_attention)

    def chunk(self, rows: Tensor, ends: Tensor) -> Attend | None:
        return lambda q, k, v, scale: chunk_attention(q, k, v, rows, ends, scale)

    def prefix_pass(self, lengths: Tensor) -> PrefixPass:
        """The prefix kernel at these lengths, to be called once per layer."""

        def attend_to_prefix(q: Tensor, k: Tensor, v: Tensor, scale: float) -> PrefixParts:
            splits, tiles = self.prefix_plan(q, *k.shape[1:3])
            return prefix_attention(q, k, v, lengths, scale, splits, tiles)

        return attend_to_prefix

    def paged(
        self, q: Tensor, prefix: PagedPrefix, out: Tensor, tree: PagedTree | None = None, *, capacity: int
    ) -> None:
        """See `paged_attention`; scores are q · k / sqrt(D). capacity: largest length of a prefix."""
        parts, tiles = self.prefix_plan(q, prefix.keys.shape[1], capacity, is_paged=True)
        paged_attention(q, prefix, out, q.shape[3] ** -0.5, parts, tiles, tree)

    def prefix_plan(self, q: Tensor, kv_heads: int, slots: int, is_paged: bool = False) -> tuple[int, Tiles]:
        """Number of splits of a prefix of up to `slots` slots, and the tiles of its kernel."""
        rows = q.shape[1] // kv_heads * q.shape[2]
        shared_memory = describe_gpu(q.device).shared_memory
        tiles = prefix_tiles(rows, q.shape[3], q.dtype, shared_memory)
        at_once = programs_at_once(tiles, q.shape[3], q.dtype, shared_memory)
        return self.splits(q, kv_heads, slots, tiles.block_m, at_once, is_paged), tiles

    def splits(self, q: Tensor, kv_heads: int, slots: int, tile_rows: int, at_once: int, is_paged: bool = False) -> int:
        """Number of splits of a prefix of up to `slots` slots.

        tile_rows: query rows of a KV head that a program takes. at_once: programs that a multiprocessor runs at a time.
        """
        batch, heads, nodes, _ = q.shape
        programs = batch * kv_heads * triton.cdiv(heads // kv_heads * nodes, tile_rows)
        count = count_parts if is_paged else count_splits
        return count(programs, slots, at_once * describe_gpu(q.device).multiprocessors)


class _OneToken:
    """Attention of a pass of one token per sequence, which sees the prefix and itself."""

    def __init__(self, attend: Attend, lengths: Tensor) -> None:
        self.attend, self.lengths = attend, lengths
        self.arrivals: Tensor | None = None
        """Counters that all layers of the pass use, one after the other."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return self.attend(q, k, v, scale)

    def project(self, qkv: Tensor, slots: TokenSlots, norms: HeadNorms | None, scale: float) -> Tensor:
        """`ResidualStream.rotate_and_store`, then attention: [B, 1, H·D].

        qkv: contiguous [B, 1, (H + 2K)·D]. slots: without `rows`, so that sequence b is in row b of the cache.
        """
        batch, kv_heads, capacity, head_dim = slots.keys.shape
        if self.arrivals is None:
            self.arrivals = torch.zeros(batch * kv_heads, dtype=torch.int32, device=qkv.device)
        gpu = describe_gpu(qkv.device)
        tiles = tree_attention_tiles(head_dim, qkv.dtype, gpu.shared_memory)
        at_once = programs_at_once(tiles, head_dim, qkv.dtype, gpu.shared_memory)
        splits = count_splits(batch * kv_heads, capacity, at_once * gpu.multiprocessors)
        return token_attention(qkv, slots, self.lengths, scale, norms, self.arrivals, splits, tiles)
