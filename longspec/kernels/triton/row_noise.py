"""The generator of `torch.row_noise` as a Triton kernel, with the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.torch.row_noise import FIRST_FACTOR, GAMMA, SECOND_FACTOR, stream_offset

BLOCK = 1024
"""Numbers per program."""
_GAMMA, _FIRST, _SECOND = tl.constexpr(GAMMA), tl.constexpr(FIRST_FACTOR), tl.constexpr(SECOND_FACTOR)


@triton.jit
def _mix(x):
    """The finalizer of SplitMix64, x uint64."""
    x = (x ^ (x >> 30)) * tl.full((), _FIRST, tl.uint64)
    x = (x ^ (x >> 27)) * tl.full((), _SECOND, tl.uint64)
    return x ^ (x >> 31)


# bits = mix(key + (i + 1) * GAMMA) for the numbers i of a row, with the key of `torch.row_noise`. Groups of `last`
# numbers follow one another; the groups begin at the numbers first, first + stride, .... A uniform number is the top 53
# bits times 2^-53; an exponential one is -log((top 52 bits + 1/2) * 2^-52). One program takes BLOCK numbers of a row.
@triton.jit
def _noise_kernel(
    seeds_ptr,
    positions_ptr,
    constant_ptr,
    out_ptr,
    stream_offset,
    first,
    size,
    last,
    stride,
    EXPONENTIAL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    # Dimension 0 of a grid is the one that may exceed 65,535.
    row = tl.program_id(1).to(tl.int64)
    gamma = tl.full((), _GAMMA, tl.uint64)
    seed = tl.load(seeds_ptr + row).to(tl.uint64, bitcast=True)
    position = tl.load(positions_ptr + row).to(tl.uint64)
    key = _mix(_mix(seed) + (position + 1) * gamma)
    key = _mix(key + stream_offset.to(tl.uint64, bitcast=True))
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    number = first + (place // last).to(tl.int64) * stride + place % last
    bits = _mix(key + (number + 1).to(tl.uint64) * gamma)
    if EXPONENTIAL:
        middle = ((bits >> 12).to(tl.int64).to(tl.float64) + 0.5) * 2.220446049250313e-16  # 2^-52
        value = -tl.log(middle)
        value = tl.where(tl.load(constant_ptr + row) != 0, 1.0, value)
    else:
        value = (bits >> 11).to(tl.int64).to(tl.float64) * 1.1102230246251565e-16  # 2^-53
    tl.store(out_ptr + row * size + place, value, mask=place < size)


def row_noise(
    seeds: Tensor,
    positions: Tensor,
    stream: int,
    shape: Sequence[int],
    constant: Tensor | None = None,
    first: int = 0,
    stride: int | None = None,
) -> Tensor:
    """See `Backend.row_noise`."""
    out = torch.empty(len(seeds), *shape, dtype=torch.float64, device=seeds.device)
    size = out[0].numel()
    _noise_kernel[(triton.cdiv(size, BLOCK), len(seeds))](
        *(seeds, positions, None if constant is None else constant.view(torch.uint8), out),
        *(stream_offset(stream), first, size, shape[-1], stride or shape[-1]),
        EXPONENTIAL=constant is not None,
        BLOCK=BLOCK,
    )
    return out
