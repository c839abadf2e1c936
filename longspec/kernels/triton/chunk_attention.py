"""Causal attention of a chunk of a prompt. Its row and position stay on the device, so a CUDA graph may capture it."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.shared.device import describe_gpu
from longspec.kernels.triton.attention_tiles import (
    LOG2_E,
    check_layout,
    load_key_tile,
    load_query_tile,
    prefix_tiles,
)
from longspec.kernels.triton.paged_attention import attend_to_block
from longspec.kernels.triton.prefix_attention import attend_to_blocks, part_row


# out = softmax(scale * q . k_j) . v_j over the slots j up to the query's own. One program takes BLOCK_M query rows of
# one KV head: first the whole blocks that all its queries see, then the others with a mask.
@triton.jit(do_not_specialize=["kv_heads", "group", "num_rows"])
def _chunk_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    rows_ptr,
    ends_ptr,
    out_ptr,
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
):
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    first_row = tl.program_id(0) * BLOCK_M
    row = first_row + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    cache_row = tl.load(rows_ptr + batch).to(tl.int64)
    start = tl.load(ends_ptr + batch).to(tl.int32) - num_rows // group
    whole = (start + first_row // group + 1) // BLOCK_N
    last = start + (tl.minimum(first_row + BLOCK_M, num_rows) - 1) // group
    q_base = q_ptr + batch * stride_qb + kv_head * group * stride_qh
    q = load_query_tile(q_base, stride_qh, stride_qn, row, dim, group, num_rows, HEAD_DIM)
    k_base = k_ptr + cache_row * stride_kb + kv_head * stride_kh
    v_base = v_ptr + cache_row * stride_vb + kv_head * stride_vh
    acc, row_sum, row_max = attend_to_blocks(
        q, k_base, v_base, stride_ks, stride_vs, 0, whole, dim, scale_log2, HEAD_DIM, BLOCK_N
    )
    for block in range(whole * BLOCK_N, last + 1, BLOCK_N):
        slot = block + tl.arange(0, BLOCK_N)
        k = load_key_tile(k_base, stride_ks, slot, dim, slot <= last, HEAD_DIM)
        v = load_key_tile(v_base, stride_vs, slot, dim, slot <= last, HEAD_DIM)
        bias = tl.where(slot[None, :] <= (start + row // group)[:, None], 0.0, float("-inf"))
        row_max, row_sum, acc = attend_to_block(q, k, v, bias, row_max, row_sum, acc, scale_log2)
    out_rows = out_ptr + part_row(0, batch, 1, row, num_rows, kv_head, kv_heads, group) * HEAD_DIM
    in_tile = (row < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(out_rows[:, None] + dim[None, :], acc / row_sum[:, None], mask=in_tile)


def chunk_attention(q: Tensor, k: Tensor, v: Tensor, rows: Tensor, ends: Tensor, scale: float) -> Tensor:
    """See `DecodingAttention.chunk`. q [n, H, N, D]; k, v [B, K, S, D]; last dimensions contiguous; one dtype (fp32,
    fp16, bf16). Returns [n, H, N, D] in q's dtype, a view of [n, N, H, D]. Raises ValueError for other layouts."""
    check_layout(q, k[: len(q)], v[: len(q)])
    batch, heads, nodes, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    out = torch.empty((batch, nodes, heads, head_dim), dtype=q.dtype, device=q.device).transpose(1, 2)
    tiles = prefix_tiles(group * nodes, head_dim, q.dtype, describe_gpu(q.device).shared_memory)
    _chunk_kernel[(triton.cdiv(group * nodes, tiles.block_m), batch * kv_heads)](
        *(q, k, v, rows, ends, out),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        *(scale * LOG2_E, kv_heads, group, group * nodes),
        **tiles.options(head_dim),
    )
    return out
