"""Attention to a few near keys in training, merged with FlashAttention's to the far keys: forward and gradient.

With a lag, FlashAttention's causal mask hides the nearest keys from a query; the keys that it shows are the far ones.
The near keys come as J tensors [N, K, D], with a row per flattened token: of tensor j, the query in row i sees the key
in row i - nearest - j, or none. Plain torch takes a dozen launches per tensor, these kernels one for all tensors.
Arithmetic is in fp32.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.training import torch_flash
from longspec.kernels.training.segments import Segments
from longspec.kernels.triton.online_softmax import finite

TILE = 4096
"""Elements of q per program: rows x query heads of a KV head x D, the latter two padded to powers of two."""


@triton.jit
def _query_indices(
    tokens,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """A program's rows, indices of its queries in [H, N] and their mask, in [N, H, D] and their mask, and 0 … D - 1."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    in_group, dim = tl.arange(0, BLOCK_G), tl.arange(0, BLOCK_D)
    head = tl.program_id(1) * GROUP + in_group
    in_heads = (row < tokens)[:, None] & (in_group < GROUP)[None, :]
    in_tile = in_heads[:, :, None] & (dim < HEAD_DIM)[None, None, :]
    by_head = head[None, :] * tokens + row[:, None]
    tile = (row[:, None] * (tl.num_programs(1) * GROUP) + head[None, :])[:, :, None] * HEAD_DIM + dim[None, None, :]
    return row, by_head, in_heads, tile, in_tile, dim


@triton.jit
def _load_near(keys_ptr, values_ptr, sees_ptr, number, nearest, row, tokens, dim, HEAD_DIM: tl.constexpr):
    """For tensor `number`: whether the queries of the rows see their key; the keys and values [ROWS, 1, D] in fp32; and
    their indices in [J, N, K, D], with a mask."""
    sees = tl.load(sees_ptr + number * tokens + row, mask=row < tokens, other=0) != 0
    key_row = number * tokens + row - nearest - number
    index = ((key_row * tl.num_programs(1) + tl.program_id(1)) * HEAD_DIM)[:, None] + dim[None, :]
    seen = sees[:, None] & (dim < HEAD_DIM)[None, :]
    k = tl.load(keys_ptr + index, mask=seen, other=0.0).to(tl.float32)
    v = tl.load(values_ptr + index, mask=seen, other=0.0).to(tl.float32)
    return sees, k[:, None, :], v[:, None, :], index, seen


# For a query q, its attention `far` to the far keys with the log-sum-exp far_lse, and the near keys k_j that it sees:
#   lse = log(exp(far_lse) + sum_j exp(scale * q . k_j))
#   out = exp(far_lse - lse) * far + sum_j exp(scale * q . k_j - lse) * v_j
# by online softmax. Without any key, far_lse and lse are +inf. A program takes some rows of one KV head.
@triton.jit(do_not_specialize=["tokens", "count", "nearest"])
def _merge_kernel(
    q_ptr,
    far_ptr,
    far_lse_ptr,
    keys_ptr,
    values_ptr,
    sees_ptr,
    out_ptr,
    lse_ptr,
    tokens,
    count,
    nearest,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row, by_head, in_heads, tile, in_tile, dim = _query_indices(tokens, GROUP, HEAD_DIM, ROWS, BLOCK_G, BLOCK_D)
    q = tl.load(q_ptr + tile, mask=in_tile, other=0.0).to(tl.float32)
    acc = tl.load(far_ptr + tile, mask=in_tile, other=0.0).to(tl.float32)
    row_max = tl.load(far_lse_ptr + by_head, mask=in_heads, other=0.0)
    row_max = tl.where(row_max == float("inf"), float("-inf"), row_max)
    row_sum = tl.where(row_max == float("-inf"), 0.0, 1.0)
    for number in range(count):
        sees, k, v, _, _ = _load_near(keys_ptr, values_ptr, sees_ptr, number, nearest, row, tokens, dim, HEAD_DIM)
        score = tl.where(sees[:, None], tl.sum(q * k, 2) * scale, float("-inf"))
        new_max = tl.maximum(row_max, score)
        decay, weight = tl.exp(row_max - finite(new_max)), tl.exp(score - finite(new_max))
        acc = acc * decay[:, :, None] + weight[:, :, None] * v
        row_sum = row_sum * decay + weight
        row_max = new_max

    divisor = tl.where(row_sum > 0.0, row_sum, 1.0)
    tl.store(out_ptr + tile, acc / divisor[:, :, None], mask=in_tile)
    tl.store(lse_ptr + by_head, tl.where(row_sum > 0.0, row_max + tl.log(divisor), float("inf")), mask=in_heads)


# With the gradient do of `out`, and out and lse of all keys:
#   w_j = exp(scale * q . k_j - lse),  ds_j = w_j * (do . v_j - do . out) * scale
#   dq += sum_j ds_j * k_j,            dk_j = sum_h ds_j * q,  dv_j = sum_h w_j * do
# where h are the query heads of a KV head, and dq holds the far keys' part before. At most one query sees a row of a
# tensor, so no two programs write the same one.
@triton.jit(do_not_specialize=["tokens", "count", "nearest"])
def _gradient_kernel(
    q_ptr,
    do_ptr,
    out_ptr,
    lse_ptr,
    keys_ptr,
    values_ptr,
    sees_ptr,
    dq_ptr,
    dkeys_ptr,
    dvalues_ptr,
    tokens,
    count,
    nearest,
    scale,
    LEARNS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row, by_head, in_heads, tile, in_tile, dim = _query_indices(tokens, GROUP, HEAD_DIM, ROWS, BLOCK_G, BLOCK_D)
    q = tl.load(q_ptr + tile, mask=in_tile, other=0.0).to(tl.float32)
    do = tl.load(do_ptr + tile, mask=in_tile, other=0.0).to(tl.float32)
    do_out = tl.sum(do * tl.load(out_ptr + tile, mask=in_tile, other=0.0).to(tl.float32), 2)
    lse = tl.load(lse_ptr + by_head, mask=in_heads, other=float("inf"))
    dq = tl.load(dq_ptr + tile, mask=in_tile, other=0.0).to(tl.float32)
    for number in range(count):
        sees, k, v, index, seen = _load_near(
            keys_ptr, values_ptr, sees_ptr, number, nearest, row, tokens, dim, HEAD_DIM
        )
        weight = tl.where(sees[:, None], tl.exp(tl.sum(q * k, 2) * scale - lse), 0.0)
        ds = weight * (tl.sum(do * v, 2) - do_out) * scale
        dq += ds[:, :, None] * k
        if LEARNS:
            tl.store(dkeys_ptr + index, tl.sum(ds[:, :, None] * q, 1), mask=seen)
            tl.store(dvalues_ptr + index, tl.sum(weight[:, :, None] * do, 1), mask=seen)
    tl.store(dq_ptr + tile, dq, mask=in_tile)


class Near(NamedTuple):
    """Near keys and values, J tensors [N, K, D] each."""

    keys: Sequence[Tensor]
    values: Sequence[Tensor]
    nearest: int
    """Distance of the first tensor's keys: the row of a query less that of the key."""
    sees: Tensor
    """Whether each query sees its key of each tensor, contiguous bool [J, N]; False for the first `nearest` + j rows at
    least."""


def merged(q: Tensor, k: Tensor, v: Tensor, near: Near, segments: Segments, scale: float, reach: int = -1) -> Tensor:
    """Attention over the keys k, v that a FlashAttention call shows and those of `near`. reach: as in
    `torch_flash.flash_forward`."""
    far = torch_flash.visible(k, v, segments)
    return _Merged.apply(q, *far, (segments, scale, reach), near.nearest, near.sees, *near.keys, *near.values)


class _Merged(torch.autograd.Function):
    """In backward the weight of a key is exp(score - lse) with the LSE of the whole, so far and near keys compute their
    gradients from the `out` and `lse` of the whole, as the parts of ring attention do (arXiv 2310.01889)."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: tuple, nearest: int, sees: Tensor, *keys_values: Tensor
    ) -> Tensor:
        """k, v: the visible far keys. call: segments, scale and reach of `torch_flash.flash_forward`. keys_values: the
        keys of `Near`, then its values."""
        q = q.contiguous()
        far, far_lse, *state = map(Tensor.contiguous, torch_flash.flash_forward(q, k, v, *call))
        out, lse = torch.empty_like(far), torch.empty_like(far_lse)
        keys, values = torch.stack(keys_values).chunk(2)
        arguments = q, far, far_lse, keys, values, sees, out, lse
        _launch(_merge_kernel, arguments, keys, nearest, call[1])
        ctx.save_for_backward(q, k, v, out, lse, *state, sees, *keys_values)
        ctx.call, ctx.nearest = call, nearest
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        tensors = ctx.saved_tensors  # read once: under gradient checkpointing a second read fails
        saved, sees, stacked = tensors[:7], tensors[7], torch.stack(tensors[8:])
        q, _, _, out, lse, *_ = saved
        upstream = upstream.contiguous()
        dq, dk, dv = torch_flash.flash_backward(upstream, saved, *ctx.call)
        dq = dq.contiguous()
        learns = any(ctx.needs_input_grad[1:])
        gradients = torch.zeros_like(stacked) if learns else stacked  # not written without `learns`
        (keys, values), own = stacked.chunk(2), gradients.chunk(2)
        arguments = q, upstream, out, lse, keys, values, sees, dq, *own
        _launch(_gradient_kernel, arguments, keys, ctx.nearest, ctx.call[1], LEARNS=learns)
        return dq, dk, dv, None, None, None, *(gradients if learns else [None] * len(stacked))


def _launch(kernel: Any, tensors: Sequence[Tensor], keys: Tensor, nearest: int, scale: float, **options: bool) -> None:
    """Run a kernel on tensors of which the first are the queries [N, H, D]. keys: [J, N, K, D]."""
    (tokens, heads, head_dim), (count, _, kv_heads, _) = tensors[0].shape, keys.shape
    group = heads // kv_heads
    block_g, block_d = triton.next_power_of_2(group), triton.next_power_of_2(head_dim)
    rows = max(1, TILE // (block_g * block_d))
    kernel[triton.cdiv(tokens, rows), kv_heads](
        *tensors,
        *(tokens, count, nearest, scale),
        **options,
        GROUP=group,
        HEAD_DIM=head_dim,
        ROWS=rows,
        BLOCK_G=block_g,
        BLOCK_D=block_d,
    )
