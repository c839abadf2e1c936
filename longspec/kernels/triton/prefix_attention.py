"""Attention to the whole blocks of the cached prefix: split-KV flash decoding without a mask.

The slots after the last whole block of a prefix are left to `tree_attention`. The lengths stay on the device: each
program reads its row's length and takes an equal share of its blocks, so a ragged batch needs neither padding nor a
host synchronization, and the grid depends on shapes alone.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.shared.attention import PrefixParts
from longspec.kernels.shared.device import describe_gpu
from longspec.kernels.triton.attention_tiles import (
    LOG2_E,
    Tiles,
    check_layout,
    load_block,
    load_query_tile,
    share_begin,
)
from longspec.kernels.triton.online_softmax import store_part
from longspec.kernels.triton.overlap import overlap_options


@triton.jit
def attend_to_blocks(
    q,
    k_tile,
    v_tile,
    stride_ks,
    stride_vs,
    first,
    last,
    dim,
    scale_log2,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Attention of queries [rows, D] to the blocks first … last - 1: (out, row_sum, row_max), not normalized.

    k_tile, v_tile: the first block, at a 64-bit offset, because slots may be far apart in a large cache.
    """
    BLOCK_M: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    key = tl.arange(0, BLOCK_N)
    k_offsets = key[:, None] * stride_ks + dim[None, :]
    v_offsets = key[:, None] * stride_vs + dim[None, :]
    # Online softmax: row_max is the running maximum of the scores, row_sum and acc are relative to it.
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for _ in range(first, last):
        k = load_block(k_tile, k_offsets, dim, HEAD_DIM, BLOCK_D)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
        weights = tl.exp2(scores * scale_log2 - new_max[:, None])
        decay = tl.exp2(row_max - new_max)  # rescales what was summed relative to the old maximum
        row_sum = row_sum * decay + tl.sum(weights, 1)
        v = load_block(v_tile, v_offsets, dim, HEAD_DIM, BLOCK_D)
        acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
        row_max = new_max
        k_tile += BLOCK_N * stride_ks
        v_tile += BLOCK_N * stride_vs
    return acc, row_sum, row_max


@triton.jit
def part_row(split, batch, batches, row, num_rows, kv_head, kv_heads, group):
    """Where a part of a row is written, int64. The parts are laid out [P, B, N, H], and row = node * group + head."""
    node = ((split * batches + batch) * (num_rows // group) + row // group).to(tl.int64)
    return (node * kv_heads + kv_head) * group + row % group


# For a query q and the keys k_j and values v_j of split p, by online softmax over blocks of keys:
#   lse_p = log sum_j exp(scale * q . k_j)
#   out_p = sum_j exp(scale * q . k_j - lse_p) * v_j
# Split p of P of a prefix of n whole blocks has the blocks floor(p * n / P) ... floor((p + 1) * n / P) - 1.
# One program takes BLOCK_M query rows of one KV head and one split.
@triton.jit(do_not_specialize=["kv_heads", "group", "num_rows"])
def _prefix_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
    out_ptr,
    lse_ptr,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    scale_log2,
    kv_heads,
    group,
    num_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Grid: tiles of query rows, splits, sequences x KV heads.
    split = tl.program_id(1)
    splits = tl.num_programs(1)
    batch = (tl.program_id(2) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(2) % kv_heads).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    blocks = tl.load(lengths_ptr + batch).to(tl.int32) // BLOCK_N
    first = share_begin(blocks, split, splits)
    last = share_begin(blocks, split + 1, splits)
    if OVERLAP:
        # The tree attention kernel reads queries and the tree's keys before it waits for the parts, so it may start
        # when the kernel that wrote these has ended.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    q_base = q_ptr + batch * stride_qb + kv_head * group * stride_qh
    q = load_query_tile(q_base, stride_qh, stride_qn, row, dim, group, num_rows, HEAD_DIM)
    k_tile = k_ptr + batch * stride_kb + kv_head * stride_kh + (first * BLOCK_N).to(tl.int64) * stride_ks
    v_tile = v_ptr + batch * stride_vb + kv_head * stride_vh + (first * BLOCK_N).to(tl.int64) * stride_vs
    acc, row_sum, row_max = attend_to_blocks(
        q, k_tile, v_tile, stride_ks, stride_vs, first, last, dim, scale_log2, HEAD_DIM, BLOCK_N
    )
    rows_out = part_row(split, batch, tl.num_programs(2) // kv_heads, row, num_rows, kv_head, kv_heads, group)
    store_part(out_ptr, lse_ptr, rows_out, acc, row_sum, row_max, row < num_rows, dim, HEAD_DIM)


def prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, num_splits: int, tiles: Tiles
) -> PrefixParts:
    """Attention of each query to the whole blocks of its prefix, in P = `num_splits` parts.

    q [B, H, N, D]; k, v: the cache [B, K, S, D] in any strides with a contiguous last dimension; all of one dtype
    (fp32, fp16, bf16). lengths int [B]; scale > 0. Sequence b sees slots 0 … lengths[b] // block_n * block_n - 1;
    later slots are never read. A part is a run of whole blocks and may be empty. Returns parts in fp32, views of
    [P, B, N, H, D] and [P, B, N, H]. Raises ValueError for tensors of other layouts.
    """
    check_layout(q, k, v)
    batch, heads, nodes, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    overlap = describe_gpu(q.device).overlaps

    # In fp32, because rounding the parts would add to the error of their merge.
    out = torch.empty((num_splits, batch, nodes, heads, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty(out.shape[:-1], dtype=torch.float32, device=q.device)

    _prefix_kernel[(triton.cdiv(group * nodes, tiles.block_m), num_splits, batch * kv_heads)](
        *(q, k, v, lengths, out, lse),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], scale * LOG2_E, kv_heads, group, group * nodes),
        **tiles.options(head_dim),
        **overlap_options(overlap),
    )
    return PrefixParts(out.transpose(2, 3), lse.transpose(2, 3), tiles.block_n, overlap)
