"""Attention to a tree under its mask and to the slots before it: the end of a prefix, or the draft's ring buffer.

What the prefix kernel leaves over is merged with its parts. (LongSpec, arXiv 2502.17421: hybrid tree attention, whose
tree part and merge this fuses.)
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.shared.attention import PrefixParts
from longspec.kernels.shared.device import describe_gpu
from longspec.kernels.triton.attention_tiles import LOG2_E, check_layout, load_query_tile, tree_attention_tiles
from longspec.kernels.triton.online_softmax import attend_to_slots, finite
from longspec.kernels.triton.overlap import overlap_options


# Merge of states by their log-sum-exp, with the tree's own state as one of them:
#   m = max(row_max, max_p lse_p)
#   sum = row_sum * exp(row_max - m) + sum_p exp(lse_p - m)
#   out = out * exp(row_max - m) + sum_p exp(lse_p - m) * out_p
# and out / sum is the attention to all keys. For two states this is sigmoid(lse_1 - lse_2) * out_1 + sigmoid(lse_2 -
# lse_1) * out_2. Everything is in base 2.
@triton.jit
def merge_parts(
    out,
    row_sum,
    row_max,
    part_rows,
    lse_rows,
    stride_part,
    stride_lse,
    in_rows,
    in_tile,
    dim,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
):
    """Add all prefix parts to the attention `out` [rows, D], not normalized; return the new out and its sums."""
    LOG2_E: tl.constexpr = 1.4426950408889634
    # The LSEs of all parts at once give the common maximum before any output is read.
    part = tl.arange(0, PARTS_PADDED)
    in_parts = (part < PARTS)[:, None] & in_rows[None, :]
    lse_tile = lse_rows[None, :] + part.to(tl.int64)[:, None] * stride_lse
    lses = tl.load(lse_tile, mask=in_parts, other=float("-inf")) * LOG2_E
    finite_max = finite(tl.maximum(row_max, tl.max(lses, 0)))
    decay = tl.exp2(row_max - finite_max)
    row_sum = row_sum * decay + tl.sum(tl.exp2(lses - finite_max[None, :]), 0)
    out = out * decay[:, None]
    # The output of an empty part, which may be NaN, is loaded and dropped, so that no load waits for another. An LSE is
    # loaded as a column, because threads would have to exchange a row of them, with a barrier per part.
    for _ in tl.static_range(PARTS):
        lse = tl.load(lse_rows[:, None], mask=in_rows[:, None], other=float("-inf"))
        part_out = tl.load(part_rows[:, None] + dim[None, :], mask=in_tile, other=0.0).to(tl.float32)
        weight = tl.exp2(lse * LOG2_E - finite_max[:, None])
        out += tl.where(weight > 0.0, part_out * weight, 0.0)
        part_rows += stride_part
        lse_rows += stride_lse
    return out, row_sum


# out = attention to the slots from the last whole block of the prefix on and to the tree, merged with PARTS states of
# attention to the slots before. With WINDOW, attention to a ring buffer of slots in the draft's window and to the tree
# after it. One program takes BLOCK_M query rows of one KV head.
@triton.jit(do_not_specialize=["kv_heads", "group", "num_rows", "slots", "level"])
def _tree_attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
    mask_ptr,
    parts_ptr,
    lses_ptr,
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
    stride_pp,
    stride_pb,
    stride_ph,
    stride_pn,
    stride_lp,
    stride_lb,
    stride_lh,
    stride_ln,
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
    PREFIX_BLOCK: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        if WINDOW:
            tl.extra.cuda.gdc_wait()
    # Grid: tiles of query rows, sequences x KV heads. A row is a pair (node, query head of the group).
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    in_rows = row < num_rows
    in_tile = in_rows[:, None] & (dim < HEAD_DIM)[None, :]
    node = (row // group).to(tl.int64)
    head = kv_head * group + row % group

    length = tl.load(lengths_ptr + batch).to(tl.int32)
    if WINDOW:
        # `slots` is a run-time value on purpose: where Triton 3.6 knows that the loop has one iteration, it drops the
        # loop and with it the barrier between the write of a block to shared memory and its matrix product.
        first = 0
        tree_start = slots - TREE_NODES
    else:
        first = length // PREFIX_BLOCK * PREFIX_BLOCK
        tree_start = length
    q_base = q_ptr + batch * stride_qb + kv_head * group * stride_qh
    out, row_sum, row_max = attend_to_slots(
        load_query_tile(q_base, stride_qh, stride_qn, row, dim, group, num_rows, HEAD_DIM),
        k_ptr + batch * stride_kb + kv_head * stride_kh,
        v_ptr + batch * stride_vb + kv_head * stride_vh,
        stride_ks,
        stride_vs,
        mask_ptr + batch * stride_mb + node * stride_mq,
        stride_mk,
        first,
        tree_start,
        length,
        level,
        scale_log2,
        in_rows,
        dim,
        HEAD_DIM,
        BLOCK_N,
        TREE_NODES,
        WINDOW,
    )

    if PARTS:
        if OVERLAP:
            # Everything above may run at the same time as the prefix kernel. Wait for its parts.
            tl.extra.cuda.gdc_wait()
        lse_rows = lses_ptr + batch * stride_lb + head * stride_lh + node * stride_ln
        part_rows = parts_ptr + batch * stride_pb + head * stride_ph + node * stride_pn
        out, row_sum = merge_parts(
            out, row_sum, row_max, part_rows, lse_rows, stride_pp, stride_lp, in_rows, in_tile, dim, PARTS, PARTS_PADDED
        )

    # A query that saw no key has the sum 0 and the output 0.
    out = out / tl.where(row_sum > 0.0, row_sum, 1.0)[:, None]
    out_rows = out_ptr + batch * stride_ob + head * stride_oh + node * stride_on
    tl.store(out_rows[:, None] + dim[None, :], out, mask=in_tile)


def prefix_and_tree_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, tree_mask: Tensor | None, scale: float, parts: PrefixParts | None
) -> Tensor:
    """Attention to the prefix of each sequence, given the parts of its whole blocks, if any, and to the tree after it.

    q [B, H, N, D]; k, v: the cache [B, K, S, D]; last dimensions contiguous; one dtype (fp32, fp16, bf16). lengths int
    [B]. tree_mask bool [B, N, N], True where query node i sees the node in slot lengths[b] + j, or None without a tree.
    parts: any float dtype and strides, last dimension contiguous. Returns [B, H, N, D] in q's dtype, a view of
    [B, N, H, D]; a query that sees no key gets 0. Raises ValueError for tensors of other layouts.
    """
    return _launch(q, k, v, lengths, tree_mask, scale, parts is not None and parts.overlap, parts)


def masked_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """See `DecodingAttention.masked`. Dtypes, layout, result and errors as in `prefix_and_tree_attention`."""
    # All slots count as nodes of a tree after an empty prefix.
    no_prefix = torch.zeros(len(q), dtype=torch.int32, device=q.device)
    return _launch(q, k, v, no_prefix, mask, scale, overlap=False)


def window_attention(
    q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, level: int, tree_mask: Tensor, scale: float
) -> Tensor:
    """See `DecodingAttention.window`. Dtypes, layout, result and errors as in `prefix_and_tree_attention`."""
    window = k.shape[2] - tree_mask.shape[2]
    overlap = describe_gpu(q.device).overlaps
    return _launch(q, k, v, lengths, tree_mask, scale, overlap, window=window, level=level)


def _launch(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    tree_mask: Tensor | None,
    scale: float,
    overlap: bool,
    parts: PrefixParts | None = None,
    window: int = 0,
    level: int = 0,
) -> Tensor:
    check_layout(q, k, v)
    batch, heads, nodes, head_dim = q.shape
    kv_heads, slots = k.shape[1:3]
    group = heads // kv_heads
    # [B, N, H, D] in memory, so that the output projection reads contiguous rows.
    out = torch.empty((batch, nodes, heads, head_dim), dtype=q.dtype, device=q.device).transpose(1, 2)
    tiles = tree_attention_tiles(head_dim, q.dtype, describe_gpu(q.device).shared_memory)
    # A pointer argument that the kernel does not read is q.
    outs, lses, block, _ = (q, q, 1, False) if parts is None else parts
    part_strides = (0,) * 8 if parts is None else (*outs.stride()[:4], *lses.stride())
    num_parts = 0 if parts is None else len(outs)
    mask, mask_strides = (q, (0, 0, 0)) if tree_mask is None else (tree_mask.view(torch.uint8), tree_mask.stride())
    _tree_attention_kernel[(triton.cdiv(group * nodes, tiles.block_m), batch * kv_heads)](
        *(q, k, v, lengths, mask, outs, lses, out),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *mask_strides, *part_strides, *out.stride()[:3]),
        *(scale * LOG2_E, kv_heads, group, group * nodes, slots, level),
        TREE_NODES=0 if tree_mask is None else tree_mask.shape[2],
        WINDOW=window,
        PREFIX_BLOCK=block,
        PARTS=num_parts,
        PARTS_PADDED=triton.next_power_of_2(max(num_parts, 1)),
        **tiles.options(head_dim),
        **overlap_options(overlap),
    )
    return out
