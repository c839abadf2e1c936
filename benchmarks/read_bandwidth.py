"""A kernel that only reads, for the bandwidth that loads of weights can reach."""

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from benchmarks.ceilings import timed_ms

READ_BYTES = 4 << 30
"""Bytes per pass, far more than the L2 cache holds."""
LAUNCHES = ((8192, 1, 4), (8192, 8, 4), (16384, 1, 8))
"""Numbers per block, blocks per program and warps of the launches tried. The fastest one is the ceiling."""


# out[p] = the sum of the numbers x[p * n] … x[(p + 1) * n - 1], n = steps * BLOCK. The sum keeps the loads alive.
@triton.jit
def _sum_kernel(x_ptr, out_ptr, steps, BLOCK: tl.constexpr):
    program = tl.program_id(0).to(tl.int64)
    block = x_ptr + program * steps * BLOCK + tl.arange(0, BLOCK)
    acc = tl.zeros([BLOCK // 8], tl.float32)
    for _ in range(steps):
        acc += tl.sum(tl.reshape(tl.load(block).to(tl.float32), [BLOCK // 8, 8]), 1)
        block += BLOCK
    tl.store(out_ptr + program, tl.sum(acc, 0))


def read_sums(x: Tensor, block: int, steps: int, warps: int) -> Tensor:
    """fp32 [P]: the sums over the P equal shares of x, each of `steps` blocks; every number is read once."""
    out = torch.empty(x.numel() // (block * steps), dtype=torch.float32, device=x.device)
    _sum_kernel[(len(out),)](x, out, steps, BLOCK=block, num_warps=warps)
    return out


def measure_read_bandwidth() -> float:
    """Bytes per second of the fastest of LAUNCHES, which write 4 bytes per 16 KiB read or less."""
    x = torch.ones(READ_BYTES // 2, dtype=torch.bfloat16, device="cuda")
    times = []
    for launch in LAUNCHES:
        read = partial(read_sums, x, *launch)
        # The first passes compile the kernel and raise the clock rate.
        timed_ms(read, runs=3, repeats=5)
        times.append(timed_ms(read, runs=9, repeats=5))
    return READ_BYTES / min(times) * 1e3
