"""A few rows times a matrix, as a level of the tree, its verification or a small batch needs it.

Bound by reading the weights, which a library's product of a square-ish tile does not reach here. The weights are the
tall operand of the tensor cores and the rows the narrow one; past 64 rows there is a second, narrow accumulator
instead of one padded to 128. Accumulation is fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.shared.device import describe_gpu

MAX_ROWS = 80
BLOCK_N = 64
"""Rows of the weight that a program takes."""
MOST_PARTS = 4
"""Of a product whose weight has too few rows to keep every multiprocessor reading. More cost the norm behind it more
than they save."""
SHORT_BLOCK = 64
"""Columns that a program takes at a time where rows or parts are many; elsewhere twice as many."""


@triton.jit
def _skinny_product_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    tokens,
    rows,
    width,
    stride_x,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    SPLITS: tl.constexpr,
    EVEN: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TAIL_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = row < rows
    share = tl.cdiv(tl.cdiv(width, SPLITS), BLOCK_K) * BLOCK_K
    first = tl.program_id(1) * share
    end = tl.minimum(first + share, width)
    token = tl.arange(0, BLOCK_M)
    TAIL: tl.constexpr = TAIL_M if TAIL_M > 0 else 16  # without a tail its tensors are never used
    tail = BLOCK_M + tl.arange(0, TAIL)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_tail = tl.zeros([BLOCK_N, TAIL], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_tail = tl.zeros([BLOCK_N, TAIL], tl.float32)
    # Past the last row the last one is read again, and not stored.
    read_row = tl.minimum(row, rows - 1).to(tl.int64)
    weight_row = weight_ptr + read_row[:, None] * width
    up_row = weight_ptr + (read_row + rows)[:, None] * width
    for start in range(first, end, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        if EVEN:
            w = tl.load(weight_row + column[None, :])
            inside = (token < tokens)[None, :]
        else:
            w = tl.load(weight_row + column[None, :], mask=(column < end)[None, :], other=0.0)
            inside = (token < tokens)[None, :] & (column < end)[:, None]
        x = tl.load(x_ptr + token[None, :] * stride_x + column[:, None], mask=inside, other=0.0)
        acc = tl.dot(w, x, acc, input_precision="ieee")
        if TAIL_M > 0:
            in_tail = (tail < tokens)[None, :] & (column < end)[:, None]
            x_tail = tl.load(x_ptr + tail[None, :] * stride_x + column[:, None], mask=in_tail, other=0.0)
            acc_tail = tl.dot(w, x_tail, acc_tail, input_precision="ieee")
        if GATED:
            if EVEN:
                w_up = tl.load(up_row + column[None, :])
            else:
                w_up = tl.load(up_row + column[None, :], mask=(column < end)[None, :], other=0.0)
            up = tl.dot(w_up, x, up, input_precision="ieee")
            if TAIL_M > 0:
                up_tail = tl.dot(w_up, x_tail, up_tail, input_precision="ieee")

    if HAS_BIAS:
        bias = tl.load(bias_ptr + row, mask=in_rows, other=0.0).to(tl.float32)[:, None]
        acc += bias
        acc_tail += bias
    if GATED:
        acc = acc * tl.sigmoid(acc) * up
        acc_tail = acc_tail * tl.sigmoid(acc_tail) * up_tail
    out = out_ptr + tl.program_id(1).to(tl.int64) * tokens * rows + row[:, None]
    tl.store(out + token[None, :] * rows, acc, mask=in_rows[:, None] & (token < tokens)[None, :])
    if TAIL_M > 0:
        tl.store(out + tail[None, :] * rows, acc_tail, mask=in_rows[:, None] & (tail < tokens)[None, :])


def skinny_product(x: Tensor, weight: Tensor, bias: Tensor | None = None, gated: bool = False) -> Tensor:
    """x @ weight.T + bias for at most MAX_ROWS rows: x contiguous [T, K], weight contiguous [N, K], bias [N]: [T, N].

    gated: weight is [2·I, K], gates first, and the result silu(gate) · up, [T, I].
    """
    rows = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty(len(x), rows)
    _launch(x, weight, bias, out, rows, gated, splits=1)
    return out


def split_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in P parts that are still to be added: fp32 [P, T, N]; P follows from weight's shape and device."""
    rows, width = weight.shape
    parts = count_parts(rows, width, describe_gpu(x.device).multiprocessors)
    out = torch.empty(parts, len(x), rows, dtype=torch.float32, device=x.device)
    _launch(x, weight, None, out, rows, False, parts)
    return out


def count_parts(rows: int, width: int, multiprocessors: int) -> int:
    """Parts of equal width, two blocks each at least, that give every multiprocessor a program; two in any case."""
    programs, blocks = triton.cdiv(rows, BLOCK_N), width // SHORT_BLOCK
    most = min(MOST_PARTS, multiprocessors // programs, blocks // 2)
    return next((parts for parts in range(most, 2, -1) if width % (SHORT_BLOCK * parts) == 0), 2)


def _launch(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, rows: int, gated: bool, splits: int) -> None:
    tokens, width = x.shape
    block_m, tail_m = (64, 16) if tokens > 64 else (max(16, triton.next_power_of_2(tokens)), 0)
    block_k = SHORT_BLOCK if splits > 2 or (tokens > 16 and splits == 1) else 2 * SHORT_BLOCK
    stage_bytes = x.element_size() * block_k * (BLOCK_N * (2 if gated else 1) + block_m + tail_m)
    _skinny_product_kernel[(triton.cdiv(rows, BLOCK_N), splits)](
        x,
        weight,
        x if bias is None else bias,
        out,
        tokens,
        rows,
        width,
        x.stride(0),
        HAS_BIAS=bias is not None,
        GATED=gated,
        SPLITS=splits,
        EVEN=width % (block_k * splits) == 0,
        BLOCK_M=block_m,
        TAIL_M=tail_m,
        BLOCK_N=BLOCK_N,
        BLOCK_K=block_k,
        num_warps=4,
        num_stages=max(1, min(5, describe_gpu(x.device).shared_memory // stage_bytes)),
    )
