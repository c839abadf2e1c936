"""The argmax of each row over the vocabulary, and draws by exponential noise, with many programs per row.

With noise, token x arrives at the time E(x) / w(x), where E(x) is exponential noise of rate 1. The first arrival is x
with probability w(x) / sum(w), so it is a draw in proportion to the weights w. It is the argmax of w(x) / E(x).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.shared.watch import Watch, launch_arguments
from longspec.kernels.triton.logit_statistics import CHUNK


# For chunk c of a row: maximum[c] = max_x y(x) and index[c] = argmax_x y(x), where y is the values, or values / noise
# if HAS_NOISE. One program takes one chunk.
@triton.jit
def _chunk_kernel(
    values_ptr, noise_ptr, maximum_ptr, index_ptr, vocab, chunks, CHUNK: tl.constexpr, HAS_NOISE: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(values_ptr + row * vocab + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    if HAS_NOISE:
        noise = tl.load(noise_ptr + row * vocab + column, mask=column < vocab, other=1.0)
        values = values / noise.to(tl.float32)

    # NaN counts as infinity: it wins, so that the row is recognized, and the index stays within the vocabulary.
    values = tl.where(values < float("inf"), values, float("inf"))
    maximum, index = tl.max(values, 0, return_indices=True)
    tl.store(maximum_ptr + row * chunks + chunk, maximum)
    tl.store(index_ptr + row * chunks + chunk, chunk * CHUNK + index)


# out = index[argmax_c maximum[c]]. One program takes one row.
@triton.jit
def _row_kernel(
    maximum_ptr,
    index_ptr,
    out_ptr,
    faults_ptr,
    fault,
    chunks,
    rows_per_sequence,
    BLOCK_C: tl.constexpr,
    WATCH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK_C)
    maxima = tl.load(maximum_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    largest, winner = tl.max(maxima, 0, return_indices=True)
    tl.store(out_ptr + row, tl.load(index_ptr + row * chunks + winner).to(tl.int64))
    if WATCH:
        is_finite = (largest > float("-inf")) & (largest < float("inf"))
        tl.store(faults_ptr + row // rows_per_sequence, fault, mask=is_finite == 0)


def argmax(values: Tensor, watch: Watch | None = None) -> Tensor:
    """See `Backend.argmax`; any float dtype but fp64."""
    return _launch(values, None, watch)


def first_arrival(weights: Tensor, noise: Tensor) -> Tensor:
    """See `Backend.first_arrival`; weights of any float dtype but fp64."""
    return _launch(weights, noise, None)


def _launch(values: Tensor, noise: Tensor | None, watch: Watch | None) -> Tensor:
    vocab = values.shape[-1]
    rows = values.numel() // vocab
    chunks = triton.cdiv(vocab, CHUNK)
    maximum = torch.empty(rows, chunks, device=values.device)
    index = torch.empty(rows, chunks, dtype=torch.int32, device=values.device)
    out = torch.empty(values.shape[:-1], dtype=torch.long, device=values.device)

    # Two launches: one row has too few programs to read its vocabulary fast, so each chunk of a row gets its own.
    _chunk_kernel[(rows, chunks)](
        *(values.contiguous(), None if noise is None else noise.contiguous()),
        *(maximum, index, vocab, chunks),
        CHUNK=CHUNK,
        HAS_NOISE=noise is not None,
        num_warps=8,
    )
    _row_kernel[(rows,)](
        *(maximum, index, out, *launch_arguments(watch)),
        *(chunks, rows // len(values)),
        BLOCK_C=triton.next_power_of_2(chunks),
        WATCH=watch is not None,
        num_warps=1,
    )
    return out
