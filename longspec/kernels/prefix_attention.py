"""Split-KV flash decoding over the cached prefix: every query sees every slot below its row's length, no mask.

The lengths stay on the device: each program reads its row's length and takes an equal share of it, so a ragged batch
needs neither padding nor a host synchronisation.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.reference import SPLIT_ALIGNMENT
from longspec.kernels.tiles import (
    LOG2_E,
    check_layout,
    load_key_tile,
    load_query_tile,
    softmax_step,
    store_state,
    tile_sizes,
)


@triton.jit
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
    nodes,
    num_rows,
    HEAD_DIM: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    group = num_rows // nodes
    q_base = q_ptr + batch * stride_qb + kv_head * group * stride_qh
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kh
    v_base = v_ptr + batch * stride_vb + kv_head * stride_vh

    length = tl.load(lengths_ptr + batch).to(tl.int32)
    share = tl.cdiv(length, tl.num_programs(2))
    chunk = tl.cdiv(share, ALIGNMENT) * ALIGNMENT
    first = tl.program_id(2) * chunk
    end = tl.minimum(first + chunk, length)

    q = load_query_tile(q_base, stride_qh, stride_qn, row, dim, nodes, num_rows, HEAD_DIM)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(first, end, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        k = load_key_tile(k_base, stride_ks, slot, dim, end, HEAD_DIM)
        v = load_key_tile(v_base, stride_vs, slot, dim, end, HEAD_DIM)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where((slot < end)[None, :], scores, float("-inf"))
        acc, row_max, row_sum = softmax_step(acc, row_max, row_sum, scores, v)

    state = tl.program_id(2).to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    lse_base = lse_ptr + state * num_rows
    out_base = out_ptr + state * num_rows * HEAD_DIM
    store_state(out_base, lse_base, acc, row_max, row_sum, row, dim, num_rows, HEAD_DIM)


def prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, num_splits: int
) -> tuple[Tensor, Tensor]:
    """Partial attention of each query over the cached prefix, in `num_splits` parts.

    q [B, Hq, N, D]; k, v the cache [B, Hkv, S, D] in any strides with a contiguous last dimension, all of one dtype
    (fp32, fp16, bf16); lengths int [B]. Row b sees slots 0 … lengths[b] - 1; later slots are never read.
    Part p covers the p-th run of `reference.split_length(lengths[b], num_splits)` slots and may be empty.
    Returns o fp32 [num_splits, B, Hq, N, D] and lse fp32 [num_splits, B, Hq, N].
    """
    out = torch.empty((num_splits, *q.shape), dtype=torch.float32, device=q.device)
    lse = torch.empty(out.shape[:-1], dtype=torch.float32, device=q.device)
    launch_prefix_attention(q, k, v, lengths, scale, out, lse)
    return out, lse


def launch_prefix_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float, out: Tensor, lse: Tensor
) -> None:
    """`prefix_attention` into given contiguous buffers: out fp32 [P, B, Hq, N, D], lse fp32 [P, B, Hq, N]."""
    check_layout(q, k, v)
    batch, heads, nodes, head_dim = q.shape
    kv_heads = k.shape[1]
    num_rows = heads // kv_heads * nodes
    tiles = tile_sizes(num_rows, head_dim, q.dtype)
    grid = (triton.cdiv(num_rows, tiles.block_m), batch * kv_heads, out.shape[0])
    _prefix_kernel[grid](
        q,
        k,
        v,
        lengths,
        out,
        lse,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        scale * LOG2_E,
        kv_heads,
        nodes,
        num_rows,
        HEAD_DIM=head_dim,
        ALIGNMENT=SPLIT_ALIGNMENT,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=tiles.block_d,
    )
