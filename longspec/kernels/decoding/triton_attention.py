"""Decoding attention on CUDA: a prefix kernel, ours or FlashAttention-3's, and the finishing kernel behind it.

Grids and split counts follow from shapes and the device alone, lengths stay on the device: every call may be captured
in a CUDA graph and replayed at other lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.decoding.attention import Attend, causal_prefill
from longspec.kernels.decoding.attention_tiles import (
    PrefixParts,
    count_splits,
    prefix_tiles,
    programs_at_once,
    share_begin,
)
from longspec.kernels.decoding.prefix_attention import prefix_attention
from longspec.kernels.decoding.tree_attention import masked_attention, prefix_and_tree_attention, window_attention
from longspec.kernels.shared.device import Gpu

FLASH_TILES = {64: (192, 192), 96: (192, 144), 128: (128, 176), 192: (128, 112), 256: (128, 80)}
"""Query rows of a KV head and keys of a FlashAttention-3 tile without a mask, by the head_dim that it rounds up to."""
FLASH_FROM = (65, 16384, 50_000_000)
"""From this many query rows of a KV head, cache slots, and pairs of a query and a slot in all heads and rows on
FlashAttention-3 is the faster prefix: it takes two launches more."""


class TritonAttention:
    """Decoding attention on our own kernels."""

    name = "triton"
    capturable = True

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def hybrid(self, lengths: Tensor, tree_mask: Tensor | None) -> Attend:
        parts_of = self.prefix_parts(lengths)

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            parts = parts_of(q, k, v, scale)
            return prefix_and_tree_attention(q, k, v, lengths, tree_mask, scale, parts, self.gpu.shared_memory)

        return attend

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
        return self.hybrid(lengths, None)(q, k, v, scale)

    def window(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, level: int, tree_mask: Tensor, scale: float
    ) -> Tensor:
        return window_attention(q, k, v, lengths, level, tree_mask, scale, self.gpu.shared_memory)

    def masked(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        return masked_attention(q, k, v, mask, scale, self.gpu.shared_memory)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return causal_prefill(q, k, v, scale)

    def prefix_parts(self, lengths: Tensor) -> Callable[[Tensor, Tensor, Tensor, float], PrefixParts]:
        """The prefix kernel for one layer after the other."""

        def parts(q: Tensor, k: Tensor, v: Tensor, scale: float) -> PrefixParts:
            rows = q.shape[1] // k.shape[1] * q.shape[2]
            tiles = prefix_tiles(rows, q.shape[3], q.dtype, self.gpu.shared_memory)
            at_once = programs_at_once(tiles, q.shape[3], q.dtype, self.gpu.shared_memory)
            splits = self.splits(q, k, tiles.block_m, at_once)
            return prefix_attention(q, k, v, lengths, scale, splits, tiles, self.gpu.overlaps)

        return parts

    def splits(self, q: Tensor, k: Tensor, tile_rows: int, at_once: int) -> int:
        """Parts of the prefix for programs of `tile_rows` query rows of a KV head, `at_once` on a multiprocessor."""
        batch, heads, nodes, _ = q.shape
        kv_heads, slots = k.shape[1:3]
        programs = batch * kv_heads * triton.cdiv(heads // kv_heads * nodes, tile_rows)
        return count_splits(programs, slots, at_once * self.gpu.multiprocessors)


class FlashAttention(TritonAttention):
    """Decoding attention with FlashAttention-3 for prefill, and for the prefix of a cache that is large enough."""

    name = "flash"

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        import fa3_fwd_interface

        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return fa3_fwd_interface.flash_attn_func(q, k, v, softmax_scale=scale, causal=True).transpose(1, 2)

    def prefix_parts(self, lengths: Tensor) -> Callable[[Tensor, Tensor, Tensor, float], PrefixParts]:
        small = super().prefix_parts(lengths)
        shares = cache(partial(split_blocks, lengths))  # the same in every layer

        def parts(q: Tensor, k: Tensor, v: Tensor, scale: float) -> PrefixParts:
            rows = q.shape[1] // k.shape[1] * q.shape[2]
            slots = k.shape[2]
            size = (rows, slots, q.shape[:3].numel() * slots)
            if any(has < least for has, least in zip(size, FLASH_FROM, strict=True)):
                return small(q, k, v, scale)
            tile_rows, block = next(tile for head_dim, tile in FLASH_TILES.items() if q.shape[3] <= head_dim)
            return flash_prefix(q, k, v, scale, shares(self.splits(q, k, tile_rows, at_once=1), block), block)

        return parts


def flash_prefix(q: Tensor, k: Tensor, v: Tensor, scale: float, shares: Tensor, block: int) -> PrefixParts:
    """The prefix's whole blocks of `block` keys on FlashAttention-3, in P bf16 parts, each a row of its batch.

    shares: int [3, P · B], as `split_blocks` makes them.
    Its own way to split leaves multiprocessors idle (a batch of 8 is not split at all) and merges the parts apart.
    Its kernel multiplies the values behind the last visible slot of a block by zero, so what lies there must be
    finite; in whole blocks nothing lies there.
    """
    import fa3_fwd_interface

    row, begin, end = shares
    batch, splits = len(q), len(row) // len(q)
    out, lse, *_ = fa3_fwd_interface.flash_attn_with_kvcache(
        q.transpose(1, 2).expand(splits, -1, -1, -1, -1).flatten(0, 1),
        k.transpose(1, 2),
        v.transpose(1, 2),
        cache_batch_idx=row,
        cache_leftpad=begin,
        cache_seqlens=end,
        softmax_scale=scale,
        num_splits=1,
        return_softmax_lse=True,
    )
    parts = out.unflatten(0, (splits, batch)).transpose(2, 3)
    return PrefixParts(parts, lse.unflatten(0, (splits, batch)), block, overlap=False)


@triton.jit
def _split_blocks_kernel(lengths_ptr, out_ptr, BLOCK: tl.constexpr):
    split, batch = tl.program_id(0), tl.program_id(1)
    splits, rows = tl.num_programs(0), tl.num_programs(1)
    blocks = tl.load(lengths_ptr + batch).to(tl.int32) // BLOCK
    part, parts = split * rows + batch, splits * rows
    tl.store(out_ptr + part, batch)
    tl.store(out_ptr + parts + part, share_begin(blocks, split, splits) * BLOCK)
    tl.store(out_ptr + 2 * parts + part, share_begin(blocks, split + 1, splits) * BLOCK)


def split_blocks(lengths: Tensor, splits: int, block: int) -> Tensor:
    """int32 [3, splits * B] for lengths int [B]: of part p of row b, at p * B + b, its row, first slot and end.

    The parts of a row together are its whole blocks of `block` slots, each an equal share. One launch.
    """
    out = torch.empty(3, splits * len(lengths), dtype=torch.int32, device=lengths.device)
    _split_blocks_kernel[(splits, len(lengths))](lengths, out, BLOCK=block, num_warps=1)
    return out
