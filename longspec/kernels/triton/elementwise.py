"""The operations between matrix products, one launch each.

They are RMSNorm, the embedding, SwiGLU, and rotary embedding with the store into the KV cache. Arithmetic is in fp32,
rounded once to the dtype of the tensors. E is the hidden size, I the intermediate size of the MLP.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.shared.device import describe_gpu
from longspec.kernels.shared.residual import HeadNorms, RopeTable, TokenSlots
from longspec.kernels.triton.overlap import overlap_options


# x = x + sum_p parts[p];  out = weight * x / sqrt(mean(x^2) + eps). One program takes one row.
@triton.jit
def _rms_norm_kernel(
    x_ptr,
    parts_ptr,
    weight_ptr,
    out_ptr,
    width,
    eps,
    part_size,
    NUM_PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    offset = row * width + column
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    x = tl.load(x_ptr + offset, mask=inside, other=0.0).to(tl.float32)
    if NUM_PARTS > 0:
        # The sum is rounded to the dtype of x before the norm, as in a model that stores it.
        for part in tl.static_range(NUM_PARTS):
            x += tl.load(parts_ptr + part * part_size + offset, mask=inside, other=0.0)
        x = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + offset, x, mask=inside)
        x = x.to(tl.float32)

    # Masked columns are 0 and add nothing to the sum.
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    # transformers rounds before it multiplies by the weight.
    normed = (x * scale).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + offset, normed * weight, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, parts: Tensor | None = None) -> Tensor:
    """weight * x / sqrt(mean(x^2) + eps) over the last dimension; x contiguous [..., E], weight [E].

    parts: contiguous fp32 [P, ..., E], a matrix product in parts (see `split_product`); added to x first, in place.
    """
    out = torch.empty_like(x)
    width = x.shape[-1]
    # The whole row in one program, because the mean needs all of it.
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(x.numel() // width,)](
        *(x, x if parts is None else parts, weight, out),
        *(width, eps, x.numel()),
        NUM_PARTS=0 if parts is None else len(parts),
        BLOCK=block,
        num_warps=1 if block <= 256 else max(4, min(16, block // 512)),
        **overlap_options(describe_gpu(x.device).overlaps),
    )
    return out


# out[i] = table[index[i]]. One program takes BLOCK columns of one row.
@triton.jit
def _embed_kernel(table_ptr, index_ptr, out_ptr, width, BLOCK: tl.constexpr):
    out_row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    table_row = tl.load(index_ptr + out_row).to(tl.int64)
    values = tl.load(table_ptr + table_row * width + column, mask=column < width)
    tl.store(out_ptr + out_row * width + column, values, mask=column < width)


def embed(table: Tensor, tokens: Tensor) -> Tensor:
    """See `Backend.embed`; tokens int [...]."""
    width = table.shape[1]
    out = table.new_empty(*tokens.shape, width)
    _embed_kernel[(tokens.numel(), triton.cdiv(width, 1024))](table, tokens.contiguous(), out, width, BLOCK=1024)
    return out


# out = gate * sigmoid(gate) * up. One program takes BLOCK columns of one row.
@triton.jit
def _swiglu_kernel(gate_ptr, up_ptr, out_ptr, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, gate * tl.sigmoid(gate) * up, mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) * up, both [..., I]: contiguous tensors or the halves of a merged projection."""
    width = gate.shape[-1]
    out = gate.new_empty(gate.shape)
    grid = (out.numel() // width, triton.cdiv(width, 1024))
    _swiglu_kernel[grid](gate, up, out, width, gate.stride(-2), BLOCK=1024)
    return out


# For a query or key head x with halves (low, high), at position t:
#   rotated = (low * cos[t, :D/2] - high * sin[t, :D/2], high * cos[t, D/2:] + low * sin[t, D/2:])
# Values are rotated with cos = 1 and sin = 0. With HAS_NORM, x is rms_norm(x) * weight, with a weight for queries and
# one for keys. Queries go to q, keys and values to a slot of the cache, with HAS_ROWS in row rows[b] instead of row b.
# One program takes BLOCK_H heads of one token.
@triton.jit
def _rotate_and_store_kernel(
    qkv_ptr,
    positions_ptr,
    slots_ptr,
    rows_ptr,
    cos_ptr,
    sin_ptr,
    q_norm_ptr,
    k_norm_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    eps,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    nodes,
    q_heads,
    kv_heads,
    HAS_NORM: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    HALF: tl.constexpr = HEAD_DIM // 2
    # Heads are numbered as in the projection: queries, keys, values.
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_HALF)
    heads = q_heads + 2 * kv_heads
    # D may be no power of two, such as 96.
    inside = (head < heads)[:, None] & (dim < HALF)[None, :]
    row = qkv_ptr + (token * heads + head)[:, None] * HEAD_DIM + dim[None, :]
    low = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(row + HALF, mask=inside, other=0.0).to(tl.float32)

    # Row of the table for this token; values get the identity rotation.
    table = tl.load(positions_ptr + token).to(tl.int64) * HEAD_DIM + dim
    in_half = dim < HALF
    is_value = (head >= q_heads + kv_heads)[:, None]
    if HAS_NORM:
        scale = 1.0 / tl.sqrt((tl.sum(low * low, 1) + tl.sum(high * high, 1)) / HEAD_DIM + eps)[:, None]
        takes_q_norm = (head < q_heads)[:, None]
        q_weight_low = tl.load(q_norm_ptr + dim, mask=in_half, other=0.0)[None, :]
        k_weight_low = tl.load(k_norm_ptr + dim, mask=in_half, other=0.0)[None, :]
        q_weight_high = tl.load(q_norm_ptr + HALF + dim, mask=in_half, other=0.0)[None, :]
        k_weight_high = tl.load(k_norm_ptr + HALF + dim, mask=in_half, other=0.0)[None, :]
        weight_low = tl.where(takes_q_norm, q_weight_low, k_weight_low).to(tl.float32)
        weight_high = tl.where(takes_q_norm, q_weight_high, k_weight_high).to(tl.float32)
        # transformers rounds the normalized head and its product with the weight.
        rounded = qkv_ptr.dtype.element_ty
        normed_low = ((low * scale).to(rounded).to(tl.float32) * weight_low).to(rounded).to(tl.float32)
        normed_high = ((high * scale).to(rounded).to(tl.float32) * weight_high).to(rounded).to(tl.float32)
        low = tl.where(is_value, low, normed_low)
        high = tl.where(is_value, high, normed_high)
    cos_low = tl.where(is_value, 1.0, tl.load(cos_ptr + table, mask=in_half, other=0.0).to(tl.float32)[None, :])
    cos_high = tl.where(is_value, 1.0, tl.load(cos_ptr + table + HALF, mask=in_half, other=0.0).to(tl.float32)[None, :])
    sin_low = tl.where(is_value, 0.0, tl.load(sin_ptr + table, mask=in_half, other=0.0).to(tl.float32)[None, :])
    sin_high = tl.where(is_value, 0.0, tl.load(sin_ptr + table + HALF, mask=in_half, other=0.0).to(tl.float32)[None, :])
    rotated_low = low * cos_low - high * sin_low
    rotated_high = high * cos_high + low * sin_high

    # Masks select the destination, so that one program handles heads of all kinds.
    is_query = inside & (head < q_heads)[:, None]
    out = q_ptr + (token * q_heads + head)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out, rotated_low, mask=is_query)
    tl.store(out + HALF, rotated_high, mask=is_query)
    # Without KV heads (`rotate_queries`) there is no cache. A negative slot is skipped.
    if kv_heads > 0:
        batch = token // nodes
        if HAS_ROWS:
            batch = tl.load(rows_ptr + batch).to(tl.int64)
        slot = tl.load(slots_ptr + token).to(tl.int64)
        kept = inside & (slot >= 0)
        key_head = (head - q_heads).to(tl.int64)
        key = keys_ptr + batch * stride_kb + key_head[:, None] * stride_kh + slot * stride_ks + dim[None, :]
        is_key = kept & (head >= q_heads)[:, None] & ~is_value
        tl.store(key, rotated_low, mask=is_key)
        tl.store(key + HALF, rotated_high, mask=is_key)
        value_head = key_head - kv_heads
        value = values_ptr + batch * stride_vb + value_head[:, None] * stride_vh + slot * stride_vs + dim[None, :]
        tl.store(value, rotated_low, mask=kept & is_value)
        tl.store(value + HALF, rotated_high, mask=kept & is_value)


def rotate_and_store(qkv: Tensor, slots: TokenSlots, norms: HeadNorms | None = None) -> Tensor:
    """Rotate the queries and keys of a merged projection and store its keys and values in the cache.

    qkv: contiguous [B, N, (H + 2 K) D]; query heads come first, then key heads, then value heads; H may be 0. The
    cache's last dimension is contiguous. norms: weights of a target that normalizes queries and keys. Returns
    q [B, H, N, D], a view of [B, N, H, D].
    """
    return _rotate(qkv, slots, slots.keys.shape[1], slots.keys.shape[3], norms)


def rotate_queries(q: Tensor, positions: Tensor, rope: RopeTable, head_dim: int) -> Tensor:
    """Rotary embedding of q, contiguous [B, N, H D]; returns [B, H, N, D] as `rotate_and_store` does."""
    # Without KV heads the kernel reads neither cache nor slots; any tensors will do.
    return _rotate(q, TokenSlots(positions, rope, q[None], q[None], positions), 0, head_dim, None)


def _rotate(qkv: Tensor, slots: TokenSlots, kv_heads: int, head_dim: int, norms: HeadNorms | None) -> Tensor:
    positions, rope, keys, values, numbers, rows = slots
    batch, nodes, width = qkv.shape
    heads = width // head_dim
    q_heads = heads - 2 * kv_heads
    q = qkv.new_empty(batch, nodes, q_heads, head_dim)
    q_norm, k_norm, eps = (qkv, qkv, 0.0) if norms is None else norms

    # Few heads per program where there is little work, so that it spreads over the device. With norms always, because
    # the order of a norm's sum follows from the size of the block.
    block_h = 4 if norms is not None or batch * nodes * heads < 1 << 14 else 16
    numbers = numbers.contiguous()
    _rotate_and_store_kernel[(batch * nodes, triton.cdiv(heads, block_h))](
        *(qkv, positions.contiguous(), numbers, numbers if rows is None else rows, *rope),
        *(q_norm, k_norm, q, keys, values, eps),
        *(*keys.stride()[:3], *values.stride()[:3], nodes, q_heads, kv_heads),
        HAS_NORM=norms is not None,
        HAS_ROWS=rows is not None,
        HEAD_DIM=head_dim,
        BLOCK_H=block_h,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=2,
        **overlap_options(describe_gpu(qkv.device).overlaps),
    )
    return q.transpose(1, 2)
