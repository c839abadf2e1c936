"""The draft's self-attention: to a ring buffer of accepted tokens in the window, and to tree nodes under a mask."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.shared.device import describe_gpu
from longspec.kernels.triton.attention_tiles import (
    LOG2_E,
    check_layout,
    load_query_tile,
    padded_dim,
    tree_attention_tiles,
)
from longspec.kernels.triton.online_softmax import attend_to_slots
from longspec.kernels.triton.overlap import overlap_options


# out = attention to a ring buffer of slots in the draft's window and to the TREE_NODES slots after it under the mask.
# One program takes BLOCK_M query rows of one KV head.
@triton.jit(do_not_specialize=["kv_heads", "group", "num_rows", "slots", "level"])
def _window_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
    mask_ptr,
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
    stride_mb,
    stride_mq,
    stride_mk,
    stride_ob,
    stride_oh,
    stride_on,
    scale_log2,
    kv_heads,
    group,
    num_rows,
    slots,
    level,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TREE_NODES: tl.constexpr,
    WINDOW: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    # Grid: tiles of query rows, sequences x KV heads. A row is a pair (node, query head of the group).
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    in_rows = row < num_rows
    node = (row // group).to(tl.int64)
    head = kv_head * group + row % group

    # `slots` is a run-time value on purpose: where Triton 3.6 knows that the loop has one iteration, it drops the loop
    # and with it the barrier between the write of a block to shared memory and its matrix product.
    q_base = q_ptr + batch * stride_qb + kv_head * group * stride_qh
    out, row_sum, _ = attend_to_slots(
        load_query_tile(q_base, stride_qh, stride_qn, row, dim, group, num_rows, HEAD_DIM),
        k_ptr + batch * stride_kb + kv_head * stride_kh,
        v_ptr + batch * stride_vb + kv_head * stride_vh,
        stride_ks,
        stride_vs,
        mask_ptr + batch * stride_mb + node * stride_mq,
        stride_mk,
        0,
        slots - TREE_NODES,
        tl.load(lengths_ptr + batch).to(tl.int32),
        level,
        scale_log2,
        in_rows,
        dim,
        HEAD_DIM,
        BLOCK_M,
        BLOCK_N,
        BLOCK_D,
        TREE_NODES,
        WINDOW,
    )

    # A query that saw no key has the sum 0 and the output 0.
    out = out / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    out_rows = out_ptr + batch * stride_ob + head * stride_oh + node * stride_on
    tl.store(out_rows[:, None] + dim[None, :], out, mask=in_rows[:, None] & (dim < HEAD_DIM)[None, :])


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, level: int, tree_mask: Tensor, scale: float, shared_memory: int
) -> Tensor:
    """Attention to a ring buffer of W accepted tokens and to the M tree nodes after it.

    q [B, H, N, D]: nodes at position lengths[b] + level. k, v [B, K, W + M, D], finite: slot s < W holds the newest
    position p < lengths[b] with p % W == s, visible if p >= 0 and p >= lengths[b] + level - W; slot W + j holds node j,
    visible where tree_mask, bool [B, N, M], is True. Dtypes, layout, result and errors as in
    `tree_attention.prefix_and_tree_attention`.
    """
    check_layout(q, k, v)
    batch, heads, nodes, head_dim = q.shape
    kv_heads, slots = k.shape[1:3]
    group = heads // kv_heads

    # [B, N, H, D] in memory, so that the output projection reads contiguous rows.
    out = torch.empty((batch, nodes, heads, head_dim), dtype=q.dtype, device=q.device).transpose(1, 2)
    tiles = tree_attention_tiles(head_dim, q.dtype, shared_memory)
    tree_nodes = tree_mask.shape[2]
    overlap = describe_gpu(q.device).overlaps

    _window_attention_kernel[(triton.cdiv(group * nodes, tiles.block_m), batch * kv_heads)](
        q,
        k,
        v,
        lengths,
        tree_mask.view(torch.uint8),
        out,
        *q.stride()[:3],
        *k.stride()[:3],
        *v.stride()[:3],
        *tree_mask.stride(),
        *out.stride()[:3],
        scale * LOG2_E,
        kv_heads,
        group,
        group * nodes,
        slots,
        level,
        HEAD_DIM=head_dim,
        BLOCK_M=tiles.block_m,
        BLOCK_N=tiles.block_n,
        BLOCK_D=padded_dim(head_dim),
        TREE_NODES=tree_nodes,
        WINDOW=slots - tree_nodes,
        OVERLAP=overlap,
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **overlap_options(overlap),
    )
    return out
