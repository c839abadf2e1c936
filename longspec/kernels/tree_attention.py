"""Attention of the tree's nodes to each other under the ancestor mask, with LSE, for merging with the prefix part."""

import torch
import triton
import triton.language as tl
from torch import Tensor

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
def _tree_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    starts_ptr,
    mask_ptr,
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
    stride_mb,
    stride_mq,
    stride_mk,
    scale_log2,
    kv_heads,
    nodes,
    num_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    group = num_rows // nodes
    tree_start = tl.load(starts_ptr + batch).to(tl.int64)
    q_base = q_ptr + batch * stride_qb + kv_head * group * stride_qh
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kh + tree_start * stride_ks
    v_base = v_ptr + batch * stride_vb + kv_head * stride_vh + tree_start * stride_vs
    mask_rows = mask_ptr + batch * stride_mb + (row % nodes).to(tl.int64) * stride_mq

    q = load_query_tile(q_base, stride_qh, stride_qn, row, dim, nodes, num_rows, HEAD_DIM)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for start in range(0, nodes, BLOCK_N):
        node = start + tl.arange(0, BLOCK_N)
        in_tree = (row < num_rows)[:, None] & (node < nodes)[None, :]
        visible = tl.load(mask_rows[:, None] + node[None, :] * stride_mk, mask=in_tree, other=0)
        k = load_key_tile(k_base, stride_ks, node, dim, nodes, HEAD_DIM)
        v = load_key_tile(v_base, stride_vs, node, dim, nodes, HEAD_DIM)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(visible != 0, scores, float("-inf"))
        acc, row_max, row_sum = softmax_step(acc, row_max, row_sum, scores, v)

    state = tl.program_id(1).to(tl.int64)
    lse_base = lse_ptr + state * num_rows
    out_base = out_ptr + state * num_rows * HEAD_DIM
    store_state(out_base, lse_base, acc, row_max, row_sum, row, dim, num_rows, HEAD_DIM)


def tree_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, mask: Tensor, scale: float
) -> tuple[Tensor, Tensor]:
    """Attention among the N nodes of each row's tree, whose keys lie in the cache.

    q [B, Hq, N, D]; k, v the cache [B, Hkv, S, D] in any strides with a contiguous last dimension, all of one dtype
    (fp32, fp16, bf16); starts int [B]: node j of row b lies in slot starts[b] + j; mask bool [B, N, N], True where
    query node i sees key node j. Returns o fp32 [B, Hq, N, D] and lse fp32 [B, Hq, N].
    """
    out = torch.empty(q.shape, dtype=torch.float32, device=q.device)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    launch_tree_attention(q, k, v, starts, mask, scale, out, lse)
    return out, lse


def launch_tree_attention(
    q: Tensor, k: Tensor, v: Tensor, starts: Tensor, mask: Tensor, scale: float, out: Tensor, lse: Tensor
) -> None:
    """`tree_attention` into given contiguous fp32 buffers: out [B, Hq, N, D], lse [B, Hq, N]."""
    check_layout(q, k, v)
    batch, heads, nodes, head_dim = q.shape
    kv_heads = k.shape[1]
    num_rows = heads // kv_heads * nodes
    tiles = tile_sizes(num_rows, head_dim, q.dtype)
    _tree_kernel[(triton.cdiv(num_rows, tiles.block_m), batch * kv_heads)](
        q,
        k,
        v,
        starts,
        mask.view(torch.uint8),
        out,
        lse,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *mask.stride(),
        scale * LOG2_E,
        kv_heads,
        nodes,
        num_rows,
        HEAD_DIM=head_dim,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=tiles.block_d,
    )
