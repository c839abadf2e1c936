"""What lies between matrix products, one launch each: embedding, RMSNorm, rotary embedding with the store into the
KV cache, SwiGLU. Arithmetic is fp32, rounded once to the tensors' dtype."""

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _rms_norm_kernel(
    x_ptr, parts_ptr, weight_ptr, out_ptr, width, eps, part_size, NUM_PARTS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < width
    place = row * width + column
    x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + column, mask=inside, other=0.0).to(tl.float32)
    if NUM_PARTS > 0:
        for part in tl.static_range(NUM_PARTS):
            x += tl.load(parts_ptr + part * part_size + place, mask=inside, other=0.0)
        x = x.to(x_ptr.dtype.element_ty)
        tl.store(x_ptr + place, x, mask=inside)
        x = x.to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(x * x, 0) / width + eps)
    # transformers rounds before it multiplies by the weight.
    normed = (x * scale).to(out_ptr.dtype.element_ty).to(tl.float32)
    tl.store(out_ptr + place, normed * weight, mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float, parts: Tensor | None = None) -> Tensor:
    """x / sqrt(mean(x²) + eps) · weight over the last dimension; x contiguous [..., H], weight [H].

    parts: fp32 [P, ..., H], contiguous, is added to x first, in place: a product in parts (see `skinny_product`).
    """
    out = torch.empty_like(x)
    width = x.shape[-1]
    block = triton.next_power_of_2(width)
    _rms_norm_kernel[(x.numel() // width,)](
        x,
        x if parts is None else parts,
        weight,
        out,
        width,
        eps,
        x.numel(),
        NUM_PARTS=0 if parts is None else len(parts),
        BLOCK=block,
        num_warps=max(4, min(16, block // 512)),
    )
    return out


@triton.jit
def _gather_rows_kernel(table_ptr, index_ptr, out_ptr, width, BLOCK: tl.constexpr):
    place = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row = tl.load(index_ptr + place).to(tl.int64)
    values = tl.load(table_ptr + row * width + column, mask=column < width)
    tl.store(out_ptr + place * width + column, values, mask=column < width)


def gather_rows(table: Tensor, index: Tensor) -> Tensor:
    """table[index], for an embedding: table contiguous [V, H], index int [...]: [..., H]."""
    width = table.shape[1]
    out = table.new_empty(*index.shape, width)
    _gather_rows_kernel[(index.numel(), triton.cdiv(width, 1024))](table, index.contiguous(), out, width, BLOCK=1024)
    return out


@triton.jit
def _swiglu_kernel(gate_ptr, up_ptr, out_ptr, width, stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * stride + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + row * width + column, gate * tl.sigmoid(gate) * up, mask=inside)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """silu(gate) · up, [..., I] both: contiguous tensors, or the halves of a merged projection."""
    width = gate.shape[-1]
    out = gate.new_empty(gate.shape)
    grid = (out.numel() // width, triton.cdiv(width, 1024))
    _swiglu_kernel[grid](gate, up, out, width, gate.stride(-2), BLOCK=1024)
    return out


@triton.jit
def _rotate_and_store_kernel(
    qkv_ptr,
    positions_ptr,
    slots_ptr,
    cos_ptr,
    sin_ptr,
    q_ptr,
    keys_ptr,
    values_ptr,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    nodes,
    q_heads,
    kv_heads,
    HEAD_DIM: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_HALF: tl.constexpr,
):
    HALF: tl.constexpr = HEAD_DIM // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_HALF)
    heads = q_heads + 2 * kv_heads
    inside = (head < heads)[:, None] & (dim < HALF)[None, :]
    row = qkv_ptr + (token * heads + head)[:, None] * HEAD_DIM + dim[None, :]
    low = tl.load(row, mask=inside, other=0.0).to(tl.float32)
    high = tl.load(row + HALF, mask=inside, other=0.0).to(tl.float32)

    table = tl.load(positions_ptr + token).to(tl.int64) * HEAD_DIM + dim
    in_half = dim < HALF
    is_value = (head >= q_heads + kv_heads)[:, None]
    cos_low = tl.where(is_value, 1.0, tl.load(cos_ptr + table, mask=in_half, other=0.0).to(tl.float32)[None, :])
    cos_high = tl.where(is_value, 1.0, tl.load(cos_ptr + table + HALF, mask=in_half, other=0.0).to(tl.float32)[None, :])
    sin_low = tl.where(is_value, 0.0, tl.load(sin_ptr + table, mask=in_half, other=0.0).to(tl.float32)[None, :])
    sin_high = tl.where(is_value, 0.0, tl.load(sin_ptr + table + HALF, mask=in_half, other=0.0).to(tl.float32)[None, :])
    rotated_low = low * cos_low - high * sin_low
    rotated_high = high * cos_high + low * sin_high

    is_query = inside & (head < q_heads)[:, None]
    out = q_ptr + (token * q_heads + head)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out, rotated_low, mask=is_query)
    tl.store(out + HALF, rotated_high, mask=is_query)
    if kv_heads > 0:
        batch = token // nodes
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


def rotate_and_store(
    qkv: Tensor, positions: Tensor, rope: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, slots: Tensor
) -> Tensor:
    """Rotary embedding of a merged projection's queries and keys; keys and values go into the cache.

    qkv: contiguous [B, N, (Hq + 2·Hkv)·D], query heads first, then key heads, then value heads (Hq may be 0);
    positions, slots: int [B, N]; rope: the table cos, sin, each [positions, D]; keys, values: [B, Hkv, S, D] with a
    contiguous last dimension. A token with a negative slot is not stored. Returns q [B, Hq, N, D], a view of memory
    laid out [B, N, Hq, D].
    """
    kv_heads, head_dim = keys.shape[1], keys.shape[-1]
    q_heads = qkv.shape[-1] // head_dim - 2 * kv_heads
    return _rotate(qkv, positions, rope, q_heads, kv_heads, head_dim, keys, values, slots)


def rotate_queries(q: Tensor, positions: Tensor, rope: tuple[Tensor, Tensor], head_dim: int) -> Tensor:
    """Rotary embedding of q, contiguous [B, N, Hq·D]: [B, Hq, N, D] as `rotate_and_store` returns it."""
    return _rotate(q, positions, rope, q.shape[-1] // head_dim, 0, head_dim, q[None], q[None], positions)


def _rotate(
    qkv: Tensor,
    positions: Tensor,
    rope: tuple[Tensor, Tensor],
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
) -> Tensor:
    batch, nodes, _ = qkv.shape
    q = qkv.new_empty(batch, nodes, q_heads, head_dim)
    heads = q_heads + 2 * kv_heads
    block_h = 4 if batch * nodes * heads < 1 << 14 else 16
    _rotate_and_store_kernel[(batch * nodes, triton.cdiv(heads, block_h))](
        qkv,
        positions.contiguous(),
        slots.contiguous(),
        *rope,
        q,
        keys,
        values,
        *keys.stride()[:3],
        *values.stride()[:3],
        nodes,
        q_heads,
        kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_H=block_h,
        BLOCK_HALF=triton.next_power_of_2(head_dim // 2),
        num_warps=2,
    )
    return q.transpose(1, 2)
