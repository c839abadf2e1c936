"""Decoding attention with FlashAttention-3 for prefill, and for the prefix of a large cache."""

from __future__ import annotations

from functools import cache, partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.shared.attention import Attend, PrefixParts
from longspec.kernels.triton.attention import PrefixPass, TritonAttention
from longspec.kernels.triton.attention_tiles import share_begin

FLASH_TILES = {64: (192, 192), 96: (192, 144), 128: (128, 176), 192: (128, 112), 256: (128, 80)}
"""Query rows of a KV head and keys per tile of FlashAttention-3 without a mask, by head_dim, rounded up to a key."""
FLASH_FROM = (65, 16384, 50_000_000)
"""Minimum numbers of query rows per KV head, of cache slots, and of query-slot pairs (over all heads and sequences) at
which FlashAttention-3 reads the prefix faster than our kernel, although it takes two more launches."""


class FlashAttention(TritonAttention):
    """Decoding attention with FlashAttention-3 for sizes at which it is faster than our kernels."""

    name = "flash"

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        import fa3_fwd_interface

        # FlashAttention's layout is [B, N, H, D].
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return fa3_fwd_interface.flash_attn_func(q, k, v, softmax_scale=scale, causal=True).transpose(1, 2)

    def chunk(self, rows: Tensor, ends: Tensor) -> Attend:
        import fa3_fwd_interface

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            out = fa3_fwd_interface.flash_attn_with_kvcache(
                *(x.transpose(1, 2) for x in (q, k, v)),
                cache_batch_idx=rows,
                cache_seqlens=ends,
                softmax_scale=scale,
                causal=True,
            )
            return out.transpose(1, 2)

        return attend

    def prefix_pass(self, lengths: Tensor) -> PrefixPass:
        triton_pass = super().prefix_pass(lengths)
        # The splits depend on lengths and shapes only, so all layers of a pass share one launch of `split_blocks`.
        shares_of = cache(partial(split_blocks, lengths))

        def attend_to_prefix(q: Tensor, k: Tensor, v: Tensor, scale: float) -> PrefixParts:
            rows = q.shape[1] // k.shape[1] * q.shape[2]
            slots = k.shape[2]
            pairs = q.shape[:3].numel() * slots
            sizes = zip((rows, slots, pairs), FLASH_FROM, strict=True)
            if any(size < least for size, least in sizes):
                return triton_pass(q, k, v, scale)

            tile_rows, block = next(tile for head_dim, tile in FLASH_TILES.items() if q.shape[3] <= head_dim)
            splits = self.splits(q, k.shape[1], slots, tile_rows, at_once=1)
            return flash_prefix(q, k, v, scale, shares_of(splits, block), block)

        return attend_to_prefix


def flash_prefix(q: Tensor, k: Tensor, v: Tensor, scale: float, shares: Tensor, block: int) -> PrefixParts:
    """Attention to the whole blocks of `block` slots of each prefix on FlashAttention-3, in P parts in q's dtype.

    shares: int [3, P · B] from `split_blocks`. Each part becomes a row of FlashAttention's batch. Its own way to split
    the keys leaves multiprocessors idle (a batch of 8 is not split at all) and merges the parts in a further launch.
    Its kernel multiplies the values after the last visible slot of a block by zero, so these must be finite; a whole
    block has none.
    """
    import fa3_fwd_interface

    row, begin, end = shares
    batch = len(q)
    splits = len(row) // batch
    # Each row of the batch reads the cache of its sequence, from slot `begin` to slot `end`.
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
    outs = out.unflatten(0, (splits, batch)).transpose(2, 3)
    lses = lse.unflatten(0, (splits, batch))
    return PrefixParts(outs, lses, block, overlap=False)


# For part p of P and a prefix of n = lengths[b] // block whole blocks:
#   out[:, p * B + b] = b, floor(p * n / P) * block, floor((p + 1) * n / P) * block
@triton.jit
def _split_blocks_kernel(lengths_ptr, out_ptr, BLOCK: tl.constexpr):
    split = tl.program_id(0)
    batch = tl.program_id(1)
    splits = tl.num_programs(0)
    rows = tl.num_programs(1)
    blocks = tl.load(lengths_ptr + batch).to(tl.int32) // BLOCK
    part = split * rows + batch
    parts = splits * rows
    tl.store(out_ptr + part, batch)
    tl.store(out_ptr + parts + part, share_begin(blocks, split, splits) * BLOCK)
    tl.store(out_ptr + 2 * parts + part, share_begin(blocks, split + 1, splits) * BLOCK)


def split_blocks(lengths: Tensor, splits: int, block: int) -> Tensor:
    """Row, first slot and end slot of each part of each prefix, int32 [3, P · B]; part p of row b is at p · B + b.

    lengths: int [B]. The P = `splits` parts of a row are equal shares of its whole blocks of `block` slots. One launch.
    """
    out = torch.empty(3, splits * len(lengths), dtype=torch.int32, device=lengths.device)
    _split_blocks_kernel[(splits, len(lengths))](lengths, out, BLOCK=block, num_warps=1)
    return out
