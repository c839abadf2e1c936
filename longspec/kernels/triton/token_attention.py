"""Attention of one token per sequence, from its merged projection to the input of the output projection, in one kernel.

The programs of a KV head each take a share of the prefix. The last of them to arrive merges their results with the
token's own key and value, so no second kernel has to start. Lengths stay on the device, as in `prefix_attention`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.shared.device import describe_gpu
from longspec.kernels.shared.residual import HeadNorms, TokenSlots
from longspec.kernels.triton.attention_tiles import LOG2_E, Tiles, padded_dim, share_begin
from longspec.kernels.triton.online_softmax import attend_to_slots, store_part
from longspec.kernels.triton.overlap import overlap_options, prefetch
from longspec.kernels.triton.tree_attention import merge_parts


# For a head x with halves (low, high) at position t, as in `rotate_and_store`:
#   rotated = x * cos[t] + (-high, low) * sin[t]
# With HAS_NORM, x is first rms_norm(x) * weight.
@triton.jit
def _rotated(heads, dim, in_tile, cos, sin, norm_ptr, eps, HAS_NORM: tl.constexpr, HEAD_DIM: tl.constexpr):
    """The heads [rows, D] that start at the pointers `heads`, in their dtype. cos, sin: [D], the first half of sin
    negated."""
    HALF: tl.constexpr = HEAD_DIM // 2
    dtype: tl.constexpr = heads.dtype.element_ty
    partner = tl.where(dim < HALF, dim + HALF, dim - HALF)
    x = tl.load(heads[:, None] + dim[None, :], mask=in_tile, other=0.0).to(tl.float32)
    y = tl.load(heads[:, None] + partner[None, :], mask=in_tile, other=0.0).to(tl.float32)
    if HAS_NORM:
        inside = dim < HEAD_DIM
        scale = 1.0 / tl.sqrt(tl.sum(x * x, 1) / HEAD_DIM + eps)[:, None]
        x_weight = tl.load(norm_ptr + dim, mask=inside, other=0.0).to(tl.float32)[None, :]
        y_weight = tl.load(norm_ptr + partner, mask=inside, other=0.0).to(tl.float32)[None, :]
        # transformers rounds the normalized head and its product with the weight.
        x = ((x * scale).to(dtype).to(tl.float32) * x_weight).to(dtype).to(tl.float32)
        y = ((y * scale).to(dtype).to(tl.float32) * y_weight).to(dtype).to(tl.float32)
    return (x * cos[None, :] + y * sin[None, :]).to(dtype)


@triton.jit
def _prefetch(base, stride_slot, first, end, SLOTS: tl.constexpr, HEAD_DIM: tl.constexpr):
    """Start to move the first SLOTS keys or values from `first` on into the L2 cache, in lines of 64 numbers."""
    slot = tl.minimum(first + tl.arange(0, SLOTS), tl.maximum(end - 1, 0)).to(tl.int64)
    for line in tl.static_range(0, HEAD_DIM, 64):
        prefetch(base + slot * stride_slot + line)


# Part p of PARTS, by online softmax over its share of the prefix's blocks of keys, for a query q of the KV head:
#   lse_p = log sum_j exp(scale * q . k_j),  out_p = sum_j exp(scale * q . k_j - lse_p) * v_j
# out = the merge of all parts and of the token's own (key, value) by their LSE (see `merge_parts`). One program takes
# one part for all query heads of one KV head.
@triton.jit(do_not_specialize=["kv_heads", "group"])
def _token_attention_kernel(
    qkv_ptr,
    positions_ptr,
    slots_ptr,
    lengths_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    keys_ptr,
    values_ptr,
    parts_ptr,
    lses_ptr,
    arrivals_ptr,
    out_ptr,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    scale_log2,
    eps,
    kv_heads,
    group,
    HAS_NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    GROUP: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_PADDED: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    # Grid: parts, sequences x KV heads. Heads of the projection are queries, then keys, then values.
    part = tl.program_id(0)
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    q_heads = kv_heads * group
    token_ptr = qkv_ptr + batch * (q_heads + 2 * kv_heads) * HEAD_DIM
    key_base = keys_ptr + batch * stride_kb + kv_head * stride_kh
    value_base = values_ptr + batch * stride_vb + kv_head * stride_vh
    dim = tl.arange(0, BLOCK_D)
    in_dim = (dim < HEAD_DIM)[None, :]
    length = tl.load(lengths_ptr + batch).to(tl.int32)
    table = tl.load(positions_ptr + batch).to(tl.int64) * HEAD_DIM + dim
    cos = tl.load(cos_ptr + table, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
    sin = tl.load(sin_ptr + table, mask=dim < HEAD_DIM, other=0.0).to(tl.float32)
    sin = tl.where(dim < HEAD_DIM // 2, -sin, sin)

    blocks = tl.cdiv(length, BLOCK_N)
    first = share_begin(blocks, part, PARTS) * BLOCK_N
    end = tl.minimum(share_begin(blocks, part + 1, PARTS) * BLOCK_N, length)
    if OVERLAP:
        # The lengths, positions and the prefix are older than the pass; the projection and all that is written are not.
        tl.extra.cuda.gdc_launch_dependents()
        _prefetch(key_base, stride_ks, first, end, BLOCK_N, HEAD_DIM)
        _prefetch(value_base, stride_vs, first, end, BLOCK_N, HEAD_DIM)
        tl.extra.cuda.gdc_wait()

    row = tl.arange(0, BLOCK_M)
    in_rows = row < group
    in_tile = in_rows[:, None] & in_dim
    q = _rotated(
        token_ptr + (kv_head * group + row) * HEAD_DIM,
        dim,
        in_tile,
        cos,
        sin,
        q_norm_ptr,
        eps,
        HAS_NORM,
        HEAD_DIM,
    )
    acc, row_sum, row_max = attend_to_slots(
        q,
        key_base,
        value_base,
        stride_ks,
        stride_vs,
        lengths_ptr + row,
        0,
        first,
        end,
        length,
        0,
        scale_log2,
        in_rows,
        dim,
        HEAD_DIM,
        BLOCK_N,
        0,
        0,
    )
    # The parts are laid out [P, B, H].
    stride_part = tl.num_programs(1).to(tl.int64) * group
    own_heads = batch * q_heads + kv_head * group
    part_row = part * stride_part + own_heads + row
    store_part(parts_ptr, lses_ptr, part_row, acc, row_sum, row_max, in_rows, dim, HEAD_DIM)

    # All threads' stores come before the arrival, and the last to arrive sees the stores of all others.
    tl.debug_barrier()
    arrived = tl.atomic_add(arrivals_ptr + tl.program_id(1), 1, sem="acq_rel", scope="gpu")

    if (part == 0) | (arrived == PARTS - 1):
        one = tl.arange(0, 1)
        key = _rotated(
            token_ptr + (q_heads + kv_head + one) * HEAD_DIM,
            dim,
            in_dim,
            cos,
            sin,
            k_norm_ptr,
            eps,
            HAS_NORM,
            HEAD_DIM,
        )
        value_row = token_ptr + (q_heads + kv_heads + kv_head) * HEAD_DIM
        value = tl.load(value_row + dim[None, :], mask=in_dim, other=0.0)
        if part == 0:
            # No program reads this slot. A negative one is skipped.
            slot = tl.load(slots_ptr + batch).to(tl.int64)
            tl.store(key_base + slot * stride_ks + dim[None, :], key, mask=in_dim & (slot >= 0))
            tl.store(value_base + slot * stride_vs + dim[None, :], value, mask=in_dim & (slot >= 0))

        if arrived == PARTS - 1:
            head = tl.arange(0, GROUP)
            in_group = head < group
            in_out = in_group[:, None] & in_dim
            own_q = _rotated(
                token_ptr + (kv_head * group + head) * HEAD_DIM,
                dim,
                in_out,
                cos,
                sin,
                q_norm_ptr,
                eps,
                HAS_NORM,
                HEAD_DIM,
            )
            # The state of attention to the own key alone: its score, the sum 1 and its value.
            score = tl.sum(own_q.to(tl.float32) * key.to(tl.float32), 1) * scale_log2
            row_of = own_heads + head
            out, total = merge_parts(
                tl.broadcast_to(value.to(tl.float32), [GROUP, BLOCK_D]),
                tl.full([GROUP], 1.0, tl.float32),
                score,
                parts_ptr + row_of * HEAD_DIM,
                lses_ptr + row_of,
                stride_part * HEAD_DIM,
                stride_part,
                in_group,
                in_out,
                dim,
                PARTS,
                PARTS_PADDED,
            )
            tl.store(out_ptr + row_of[:, None] * HEAD_DIM + dim[None, :], out / total[:, None], mask=in_out)
            tl.store(arrivals_ptr + tl.program_id(1), 0)  # for the next launch


def token_attention(
    qkv: Tensor,
    slots: TokenSlots,
    lengths: Tensor,
    scale: float,
    norms: HeadNorms | None,
    arrivals: Tensor,
    num_splits: int,
    tiles: Tiles,
) -> Tensor:
    """`rotate_and_store` of one token per sequence, and its attention to the prefix and itself: [B, 1, H D].

    qkv: contiguous [B, 1, (H + 2 K) D]; query heads come first, then key heads, then value heads. slots: without
    `rows`, so that sequence b is in row b of the cache, whose slots 0 … lengths[b] - 1 hold its prefix; others may hold
    anything. lengths int [B]; scale > 0. arrivals: int32 [B K], all zero before the kernel and after it. The prefix is
    read in `num_splits` parts.
    """
    positions, (cos, sin), keys, values, numbers, _ = slots
    kv_heads, head_dim = keys.shape[1], keys.shape[3]
    batch, heads = len(qkv), qkv.shape[2] // head_dim
    q_heads = heads - 2 * kv_heads
    group = q_heads // kv_heads
    # In fp32, because rounding the parts would add to the error of their merge.
    parts = torch.empty((num_splits, batch, q_heads, head_dim), dtype=torch.float32, device=qkv.device)
    lses = torch.empty(parts.shape[:-1], dtype=torch.float32, device=qkv.device)
    out = qkv.new_empty(batch, 1, q_heads * head_dim)
    q_norm, k_norm, eps = (qkv, qkv, 0.0) if norms is None else norms
    _token_attention_kernel[(num_splits, batch * kv_heads)](
        *(qkv, positions.contiguous(), numbers.contiguous(), lengths, cos, sin, q_norm, k_norm),
        *(keys, values, parts, lses, arrivals, out),
        *(*keys.stride()[:3], *values.stride()[:3], scale * LOG2_E, eps, kv_heads, group),
        HAS_NORM=norms is not None,
        HEAD_DIM=head_dim,
        BLOCK_M=max(tiles.block_m, triton.next_power_of_2(group)),
        BLOCK_N=tiles.block_n,
        BLOCK_D=padded_dim(head_dim),
        GROUP=triton.next_power_of_2(group),
        PARTS=num_splits,
        PARTS_PADDED=triton.next_power_of_2(num_splits),
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        **overlap_options(describe_gpu(qkv.device).overlaps),
    )
    return out
