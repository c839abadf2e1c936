"""Decoding attention on CUDA: a prefix kernel, ours or FlashAttention-3's, and the finishing kernel behind it.

Grids and split counts follow from shapes and the device alone, lengths stay on the device: every call may be captured
in a CUDA graph and replayed at other lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.attention import causal_prefill
from longspec.kernels.backend import Gpu
from longspec.kernels.finish import finish_prefix, masked_attention, window_attention
from longspec.kernels.prefix_attention import prefix_attention
from longspec.kernels.tiles import PrefixParts, count_splits, prefix_tiles

FLASH_BLOCKS = {64: 192, 96: 144, 128: 176, 192: 112, 256: 80}
"""Keys of one FlashAttention-3 block without a mask, by the head_dim that it rounds up to."""
FLASH_MIN_ROWS, FLASH_MIN_CAPACITY = 65, 16384
"""From this many query rows of a KV head and cache slots on FlashAttention-3 is the faster prefix."""


class TritonAttention:
    """Decoding attention on our own kernels."""

    name = "triton"
    capturable = True

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu

    def hybrid(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, tree_mask: Tensor, scale: float) -> Tensor:
        parts = self.prefix_parts(q, k, v, lengths, scale)
        return finish_prefix(q, k, v, lengths, tree_mask, scale, parts, self.gpu.shared_memory)

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
        parts = self.prefix_parts(q, k, v, lengths, scale)
        return finish_prefix(q, k, v, lengths, None, scale, parts, self.gpu.shared_memory)

    def window(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, level: int, tree_mask: Tensor, scale: float
    ) -> Tensor:
        return window_attention(q, k, v, lengths, level, tree_mask, scale, self.gpu.shared_memory)

    def masked(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
        return masked_attention(q, k, v, mask, scale, self.gpu.shared_memory)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return causal_prefill(q, k, v, scale)

    def prefix_parts(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> PrefixParts:
        batch, heads, nodes, head_dim = q.shape
        kv_heads = k.shape[1]
        rows = heads // kv_heads * nodes
        tiles = prefix_tiles(rows, head_dim, q.dtype, self.gpu.shared_memory)
        programs = batch * kv_heads * triton.cdiv(rows, tiles.block_m)
        splits = count_splits(programs, k.shape[2], self.gpu.multiprocessors)
        return prefix_attention(q, k, v, lengths, scale, splits, tiles, self.gpu.overlaps)


class FlashAttention(TritonAttention):
    """Decoding attention with FlashAttention-3 for prefill, and for the prefix of a cache that is large enough."""

    name = "flash"

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        import fa3_fwd_interface

        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return fa3_fwd_interface.flash_attn_func(q, k, v, softmax_scale=scale, causal=True).transpose(1, 2)

    def prefix_parts(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> PrefixParts:
        rows = q.shape[1] // k.shape[1] * q.shape[2]
        if rows < FLASH_MIN_ROWS or k.shape[2] < FLASH_MIN_CAPACITY:
            return super().prefix_parts(q, k, v, lengths, scale)
        return flash_prefix(q, k, v, lengths, scale)


def flash_prefix(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> PrefixParts:
    """The prefix's whole blocks on FlashAttention-3, one part in bf16.

    Its kernel multiplies the values behind the last visible slot of a block by zero, so what lies there must be
    finite; in whole blocks nothing lies there.
    """
    import fa3_fwd_interface

    block = next(keys for head_dim, keys in FLASH_BLOCKS.items() if q.shape[3] <= head_dim)
    out, lse, *_ = fa3_fwd_interface.flash_attn_with_kvcache(
        *(x.transpose(1, 2) for x in (q, k, v)),
        cache_seqlens=whole_blocks(lengths, block),
        softmax_scale=scale,
        return_softmax_lse=True,
    )
    return PrefixParts(out.transpose(1, 2)[None], lse[None], block, overlap=False)


@triton.jit
def _whole_blocks_kernel(lengths_ptr, out_ptr, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    tl.store(out_ptr + row, (tl.load(lengths_ptr + row) // BLOCK * BLOCK).to(tl.int32))


def whole_blocks(lengths: Tensor, block: int) -> Tensor:
    """int32 [B]: lengths int [B] rounded down to multiples of block, in one launch."""
    out = torch.empty_like(lengths, dtype=torch.int32)
    _whole_blocks_kernel[(len(lengths),)](lengths, out, BLOCK=block, num_warps=1)
    return out
