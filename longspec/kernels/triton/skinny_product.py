"""The product of a few rows and a matrix, for the levels of a tree, its verification and small batches.

The limit is the time to read the weights, which library kernels with square tiles do not reach at these sizes. Here the
weight is the tall operand of the tensor cores and the rows are the narrow one. From 65 rows on there is a second,
narrow accumulator, instead of one padded to 128. Accumulation is in fp32.

With `fixed_order`, the sums of a row are the same bits for any number of rows: blocks and parts of the columns follow
from the weight's shape and dtype alone, and an element of a tensor core's result does not depend on the width of its
tile. Any number of rows is then allowed.

T is the number of rows (tokens), E the input size, O the output size.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.shared.device import describe_gpu
from longspec.kernels.triton.overlap import overlap_options, prefetch

MAX_ROWS = 80
"""Largest T without `fixed_order`, and of a single tile."""
WIDE_TILE = 128
"""Rows per tile beyond MAX_ROWS; from two tiles on, programs take as many rows of the weight."""
BLOCK_N = 64
"""Rows of the weight per program."""
MOST_PARTS = 4
"""Largest number of parts of a split product. The following norm adds the parts, so more cost it more than they
save."""
SHORT_BLOCK = 64
"""Columns per step of the loop if rows or parts are many; otherwise twice as many."""


# out[t, o] = sum_e x[t, e] * weight[o, e] + bias[o], and if GATED out = silu(gate) * up, where gate is that sum over
# the first half of the rows of the weight and up over the second. With SPLITS > 1, part s has the sum over the s-th
# share of the columns. One program takes BLOCK_N outputs of one part for a tile of rows: BLOCK_M in `acc`, TAIL_M more
# in `acc_tail`.
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
    OVERLAP: tl.constexpr,
):
    # Grid: tiles of x, which share the weight's rows in the L2 cache, rows of the weight, parts.
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = row < rows
    # Each part takes the same number of whole blocks of columns; the last part takes the rest.
    share = tl.cdiv(tl.cdiv(width, SPLITS), BLOCK_K) * BLOCK_K
    first = tl.program_id(2) * share
    end = tl.minimum(first + share, width)
    token = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    TAIL: tl.constexpr = TAIL_M if TAIL_M > 0 else 16  # without a tail its tensors are never used
    tail = BLOCK_M + tl.arange(0, TAIL)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    acc_tail = tl.zeros([BLOCK_N, TAIL], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up_tail = tl.zeros([BLOCK_N, TAIL], tl.float32)

    # Programs that reach past the last row of the weight read that row again and do not store the result.
    read_row = tl.minimum(row, rows - 1).to(tl.int64)
    weight_row = weight_ptr + read_row[:, None] * width
    up_row = weight_ptr + (read_row + rows)[:, None] * width
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
        for line in tl.static_range(0, 2 * BLOCK_K, 64):
            prefetch(weight_row + tl.minimum(first + line, end - 1))
            if GATED:
                prefetch(up_row + tl.minimum(first + line, end - 1))
        tl.extra.cuda.gdc_wait()
    # EVEN: no column of a block is out of range, so the loads of the weight need no mask.
    for start in range(first, end, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        if EVEN:
            w = tl.load(weight_row + column[None, :])
            inside = (token < tokens)[None, :]
        else:
            w = tl.load(weight_row + column[None, :], mask=(column < end)[None, :], other=0.0)
            inside = (token < tokens)[None, :] & (column < end)[:, None]
        x = tl.load(x_ptr + token[None, :] * stride_x + column[:, None], mask=inside, other=0.0)
        # "ieee" keeps fp32 inputs in fp32; it has no effect on 16-bit inputs.
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
    # Parts are laid out [P, T, O]. The accumulator is [O, T], so the store transposes.
    out = out_ptr + tl.program_id(2).to(tl.int64) * tokens * rows + row[:, None]
    tl.store(out + token[None, :] * rows, acc, mask=in_rows[:, None] & (token < tokens)[None, :])
    if TAIL_M > 0:
        tl.store(out + tail[None, :] * rows, acc_tail, mask=in_rows[:, None] & (tail < tokens)[None, :])


def skinny_product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, gated: bool = False, fixed_order: bool = False
) -> Tensor:
    """x @ weight.T + bias, [T, O], for T <= MAX_ROWS, or for any T with fixed_order.

    x [T, E] and weight [O, E] are contiguous; bias [O]. gated: the weight is [2 O, E], with the gates first, and the
    result is silu(gate) * up.
    """
    rows = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty(len(x), rows)
    _launch(x, weight, bias, out, rows, gated, 1, fixed_order)
    return out


def split_product(x: Tensor, weight: Tensor, fixed_order: bool = False) -> Tensor:
    """P parts of x @ weight.T, fp32 [P, T, O], which sum to it; P follows from the weight's shape and the device."""
    rows, width = weight.shape
    parts = count_parts(rows, width, describe_gpu(x.device).multiprocessors)
    out = torch.empty(parts, len(x), rows, dtype=torch.float32, device=x.device)
    _launch(x, weight, None, out, rows, False, parts, fixed_order)
    return out


def count_parts(rows: int, width: int, multiprocessors: int) -> int:
    """Number of parts: as many as the device has multiprocessors for, of equal width and at least two blocks; at
    least 2."""
    programs = triton.cdiv(rows, BLOCK_N)
    blocks = width // SHORT_BLOCK
    most = min(MOST_PARTS, multiprocessors // programs, blocks // 2)
    return next((parts for parts in range(most, 2, -1) if width % (SHORT_BLOCK * parts) == 0), 2)


def _launch(
    x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, rows: int, gated: bool, splits: int, fixed_order: bool
) -> None:
    tokens, width = x.shape

    # 16 is the smallest size of a matrix product.
    block_m, tail_m = (64, 16) if tokens > 64 else (max(16, triton.next_power_of_2(tokens)), 0)
    block_n, num_warps = BLOCK_N, 4
    if tokens > MAX_ROWS:
        block_m, tail_m = WIDE_TILE, 0
    if tokens > WIDE_TILE and rows >= WIDE_TILE:
        block_n, num_warps = WIDE_TILE, 8
    # More rows and a gate need more shared memory per stage, so as many stages run as fit, at most 5.
    is_many = x.dtype == torch.float32 if fixed_order else tokens > 16 and splits == 1
    block_k = SHORT_BLOCK if splits > 2 or is_many else 2 * SHORT_BLOCK
    # Shorter steps where they divide the parts and the longer ones do not, because then no load is masked.
    if width % (block_k * splits) and width % (SHORT_BLOCK * splits) == 0:
        block_k = SHORT_BLOCK
    stage_bytes = x.element_size() * block_k * (block_n * (2 if gated else 1) + block_m + tail_m)
    gpu = describe_gpu(x.device)

    _skinny_product_kernel[(triton.cdiv(tokens, block_m + tail_m), triton.cdiv(rows, block_n), splits)](
        *(x, weight, x if bias is None else bias, out),
        *(tokens, rows, width, x.stride(0)),
        HAS_BIAS=bias is not None,
        GATED=gated,
        SPLITS=splits,
        EVEN=width % (block_k * splits) == 0,
        BLOCK_M=block_m,
        TAIL_M=tail_m,
        BLOCK_N=block_n,
        BLOCK_K=block_k,
        num_warps=num_warps,
        num_stages=max(1, min(5, gpu.shared_memory // stage_bytes)),
        **overlap_options(gpu.overlaps),
    )
