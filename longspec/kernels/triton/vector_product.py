"""The product of a matrix and one vector, for decoding one token.

The limit is the time to read the weights, so the operations that follow (bias, SwiGLU, residual) are fused at no cost.
So is the RMSNorm before it if the vector is short; each program then computes it again.
Arithmetic is in fp32. E is the input size, O the output size.
"""

import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.shared.device import describe_gpu
from longspec.kernels.triton.overlap import overlap_options

BLOCK_N = 4
"""Rows of the weight per program."""
BLOCK_K = 2048
"""Columns per step of the loop."""
NARROW = (64, 2048)
"""Smallest and largest width that a program takes at once."""
SMALLEST_PIECE = 256
"""Columns of the smallest piece after the last whole step. A narrower one would leave most threads without a load."""


@triton.jit
def _load(pointers, inside, EVEN: tl.constexpr):
    """A masked load, or a plain one if the sizes are EVEN: multiples of the blocks."""
    if EVEN:
        return tl.load(pointers)
    return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def _sum_tail(x_ptr, weight_row, column, TAIL: tl.constexpr, BLOCK_K: tl.constexpr):
    """[n]: the sums over the TAIL < BLOCK_K columns from `column` on, in pieces of BLOCK_K / 2, BLOCK_K / 4, …

    The pieces are the binary digits of TAIL, so no load is masked.
    """
    result = tl.zeros([weight_row.shape[0]], tl.float32)
    for halvings in tl.static_range(1, 12):
        if TAIL & (BLOCK_K >> halvings):
            piece = column + tl.arange(0, BLOCK_K >> halvings)
            x = tl.load(x_ptr + piece).to(tl.float32)[None, :]
            result += tl.sum(tl.load(weight_row + piece[None, :]).to(tl.float32) * x, 1)
            column += BLOCK_K >> halvings
    return result


@triton.jit
def _total(acc, x_ptr, weight_row, width, TAIL: tl.constexpr, BLOCK_K: tl.constexpr):
    """[n]: the sums of the partial sums [n, k] and of the last TAIL columns."""
    result = tl.sum(acc, 1)
    if TAIL > 0:
        result += _sum_tail(x_ptr, weight_row, width - TAIL, TAIL, BLOCK_K)
    return result


@triton.jit
def _store(out_ptr, row, in_rows, result, ADD: tl.constexpr):
    """out = result, or out += result if ADD."""
    if ADD:
        result += tl.load(out_ptr + row, mask=in_rows, other=0.0).to(tl.float32)
    tl.store(out_ptr + row, result, mask=in_rows)


@triton.jit
def _sum_by_eight(products):
    """[n, k] -> [n, k / 8]: adds the products of one 16-byte load at once, which leaves registers free for more
    loads."""
    return tl.sum(tl.reshape(products, [products.shape[0], products.shape[1] // 8, 8]), 2)


# y[o] = sum_e weight[o, e] * x[e] + bias[o]. If GATED, y = silu(gate) * up, where gate is that sum over the first
# half of the rows of the weight and up over the second. If ADD, out += y, else out = y. One program takes BLOCK_N
# outputs. EVEN: rows and columns are multiples of the blocks, except for the last TAIL columns.
@triton.jit
def _vector_product_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    rows,
    width,
    HAS_BIAS: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    EVEN: tl.constexpr,
    TAIL: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = row < rows
    weight_row = weight_ptr + row.to(tl.int64)[:, None] * width
    up_row = weight_ptr + (row.to(tl.int64) + rows)[:, None] * width
    # The sums stay spread over BLOCK_K / 8 lanes; they are reduced once, after the loop.
    acc = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    acc_up = tl.zeros([BLOCK_N, BLOCK_K // 8], tl.float32)
    column = tl.arange(0, BLOCK_K)
    in_tile = in_rows[:, None] & (column < width)[None, :]
    # The first block of the weight, which no kernel of a pass writes, is loaded before x is awaited.
    w = _load(weight_row + column[None, :], in_tile, EVEN)
    if GATED:
        w_up = _load(up_row + column[None, :], in_tile, EVEN)
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    x = _load(x_ptr + column, column < width, EVEN).to(tl.float32)[None, :]
    acc += _sum_by_eight(w.to(tl.float32) * x)
    if GATED:
        acc_up += _sum_by_eight(w_up.to(tl.float32) * x)
    for start in range(BLOCK_K, width - TAIL, BLOCK_K):
        column = start + tl.arange(0, BLOCK_K)
        x = _load(x_ptr + column, column < width, EVEN).to(tl.float32)[None, :]
        in_tile = in_rows[:, None] & (column < width)[None, :]
        acc += _sum_by_eight(_load(weight_row + column[None, :], in_tile, EVEN).to(tl.float32) * x)
        if GATED:
            acc_up += _sum_by_eight(_load(up_row + column[None, :], in_tile, EVEN).to(tl.float32) * x)
    result = _total(acc, x_ptr, weight_row, width, TAIL, BLOCK_K)
    if HAS_BIAS:
        result += tl.load(bias_ptr + row, mask=in_rows, other=0.0).to(tl.float32)
    if GATED:
        result = result * tl.sigmoid(result) * _total(acc_up, x_ptr, up_row, width, TAIL, BLOCK_K)
    _store(out_ptr, row, in_rows, result, ADD)


@triton.jit
def _load_row(row, WIDTH: tl.constexpr, HEAD: tl.constexpr, REST: tl.constexpr):
    """The first HEAD columns of rows that start at the pointers `row`, and the other WIDTH - HEAD, padded with 0."""
    rest = HEAD + tl.arange(0, REST)
    return tl.load(row + tl.arange(0, HEAD)), _load(row + rest, rest < WIDTH, HEAD + REST == WIDTH)


@triton.jit
def _normed(x, norm, scale, dtype: tl.constexpr):
    """norm * x * scale, rounded as in `rms_norm`."""
    return ((x * scale).to(dtype).to(tl.float32) * norm.to(tl.float32)).to(dtype).to(tl.float32)


# y as in `_vector_product_kernel`, for a vector of WIDTH columns that a program takes at once, in two pieces: HEAD and
# REST. With HAS_NORM, x is first norm * x / sqrt(mean(x^2) + eps).
@triton.jit
def _narrow_product_kernel(
    x_ptr,
    weight_ptr,
    bias_ptr,
    norm_ptr,
    out_ptr,
    rows,
    eps,
    HAS_BIAS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATED: tl.constexpr,
    ADD: tl.constexpr,
    WIDTH: tl.constexpr,
    HEAD: tl.constexpr,
    REST: tl.constexpr,
    BLOCK_N: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    # A gated program has the lines of BLOCK_N gates, then those of their ups. One that reaches past the last row of the
    # weight reads that row again and does not store the result.
    line = tl.arange(0, 2 * BLOCK_N if GATED else BLOCK_N)
    read_row = tl.minimum(tl.program_id(0) * BLOCK_N + line % BLOCK_N, rows - 1) + line // BLOCK_N * rows
    head, rest = _load_row(weight_ptr + read_row.to(tl.int64)[:, None] * WIDTH, WIDTH, HEAD, REST)
    if HAS_NORM:
        norm_head, norm_rest = _load_row(norm_ptr, WIDTH, HEAD, REST)
    row = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    in_rows = row < rows
    if HAS_BIAS:
        bias = tl.load(bias_ptr + row, mask=in_rows, other=0.0).to(tl.float32)

    if OVERLAP:
        # All loads above are of weights, which no kernel of a pass writes.
        tl.extra.cuda.gdc_wait()
    x_head, x_rest = _load_row(x_ptr, WIDTH, HEAD, REST)
    x_head = x_head.to(tl.float32)
    x_rest = x_rest.to(tl.float32)
    if HAS_NORM:
        scale = 1.0 / tl.sqrt((tl.sum(x_head * x_head, 0) + tl.sum(x_rest * x_rest, 0)) / WIDTH + eps)
        x_head = _normed(x_head, norm_head, scale, x_ptr.dtype.element_ty)
        x_rest = _normed(x_rest, norm_rest, scale, x_ptr.dtype.element_ty)
    result = tl.sum(_sum_by_eight(head.to(tl.float32) * x_head[None, :]), 1)
    result += tl.sum(_sum_by_eight(rest.to(tl.float32) * x_rest[None, :]), 1)
    if GATED:
        gate, up = tl.split(tl.trans(tl.reshape(result, [2, BLOCK_N])))
        result = gate * tl.sigmoid(gate) * up
    if HAS_BIAS:
        result += bias
    _store(out_ptr, row, in_rows, result, ADD)


def is_narrow(width: int) -> bool:
    """Whether a program of `vector_product` takes the whole vector at once, and so can normalize it."""
    return NARROW[0] <= width <= NARROW[1]


def vector_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gated: bool = False,
    add_to: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    """weight @ x + bias, [..., O], for one contiguous vector x [..., E] with leading dimensions of size 1.

    weight: contiguous [O, E]. bias: [O]. gated: the weight is [2 O, E], with the gates first, and the result is
    silu(gate) * up. add_to [..., O]: the result is added to it in place, and it is returned. norm [E], for a width that
    `is_narrow`: x is first replaced by its RMSNorm with this weight and `eps`.
    """
    width = x.shape[-1]
    rows = weight.shape[0] // 2 if gated else weight.shape[0]
    out = x.new_empty(*x.shape[:-1], rows) if add_to is None else add_to
    block_n = BLOCK_N // 2 if gated else BLOCK_N  # a gated program reads two rows of the weight per output
    grid = (triton.cdiv(rows, block_n),)
    options = {"HAS_BIAS": bias is not None, "GATED": gated, "ADD": add_to is not None, "BLOCK_N": block_n}
    options |= {"num_warps": 4, **overlap_options(describe_gpu(x.device).overlaps)}
    # A pointer argument that the kernel does not read is x.
    bias = x if bias is None else bias
    if is_narrow(width):
        head = triton.next_power_of_2(width) // 2
        sizes = {"WIDTH": width, "HEAD": head, "REST": triton.next_power_of_2(max(width - head, 8))}
        has_norm, norm = norm is not None, x if norm is None else norm
        _narrow_product_kernel[grid](x, weight, bias, norm, out, rows, eps, HAS_NORM=has_norm, **sizes, **options)
        return out
    block_k = max(8, min(BLOCK_K, triton.next_power_of_2(width)))
    tail = width % block_k
    even = rows % block_n == 0 and tail % SMALLEST_PIECE == 0
    sizes = {"EVEN": even, "TAIL": tail if even else 0, "BLOCK_K": block_k}
    _vector_product_kernel[grid](x, weight, bias, out, rows, width, **sizes, **options)
    return out
