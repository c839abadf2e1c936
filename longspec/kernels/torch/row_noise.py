"""Random numbers that depend on their row alone: a counter-based generator, keyed by seed, position and stream.

A row gets the same numbers in any batch. Number i of a row is
    mix(key + (i + 1) * GAMMA),  key = mix(mix(mix(seed) + (position + 1) * GAMMA) + (stream + 1) * GAMMA)
in 64-bit integers, where mix is the finalizer of SplitMix64.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

GAMMA = 0x9E3779B97F4A7C15
FIRST_FACTOR = 0xBF58476D1CE4E5B9
SECOND_FACTOR = 0x94D049BB133111EB


def row_noise(
    seeds: Tensor,
    positions: Tensor,
    stream: int,
    shape: Sequence[int],
    constant: Tensor | None = None,
    first: int = 0,
    stride: int | None = None,
) -> Tensor:
    """Random numbers, fp64 [B, *shape], that depend on seed, position and stream of their row alone.

    Without `constant` they are uniform in [0, 1), multiples of 2^-53. With it, bool [B], they are exponential of rate
    1, with a resolution of 2^-53, and 1 in rows where it is True. seeds: LongTensor [B], all 64 bits count. positions:
    int [B], at least 0. stream: distinguishes several draws at one position. first: number of the first one, so that
    the numbers of a stream can be taken in parts. stride: how many numbers lie between those of one index of all but
    the last dimension and of the next; None for the size of the last dimension. The bits are the same on all backends.
    """
    key = _mix(_mix(_mix(seeds) + (positions.long() + 1) * signed(GAMMA)) + stream_offset(stream))
    last, device = shape[-1], seeds.device
    starts = first + 1 + torch.arange(torch.Size(shape[:-1]).numel(), device=device) * (stride or last)
    number = (starts[:, None] + torch.arange(last, device=device)).flatten()
    bits = _mix(key[:, None] + number * signed(GAMMA)).view(len(seeds), *shape)
    if constant is None:
        return _shift(bits, 11).double() * 2.0**-53
    # The middle of each of 2^52 intervals: neither 0 nor 1, and exact in fp64.
    uniform = (_shift(bits, 12).double() + 0.5) * 2.0**-52
    return (-uniform.log()).masked_fill(constant.view(-1, *[1] * len(shape)), 1.0)


def _mix(x: Tensor) -> Tensor:
    x = (x ^ _shift(x, 30)) * signed(FIRST_FACTOR)
    x = (x ^ _shift(x, 27)) * signed(SECOND_FACTOR)
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    """x >> bits for x as an unsigned number."""
    return (x >> bits) & (2 ** (64 - bits) - 1)


def stream_offset(stream: int) -> int:
    """(stream + 1) * GAMMA as an int64."""
    return signed((stream + 1) * GAMMA % 2**64)


def signed(x: int) -> int:
    """The int64 with the bits of an unsigned x."""
    return x - 2**64 if x >= 2**63 else x
