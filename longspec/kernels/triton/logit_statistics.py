"""One pass over logits that collects the maxima and sums for their softmax and for the selection of large entries.

A row of V columns consists of chunks of CHUNK columns, one program each, and a chunk of sub-chunks of SUB columns.
Logits are divided by the temperature of their sequence as they are read; nothing of their size is written. R is the
number of rows; each sequence of the batch has the same number of them.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.shared.watch import Watch, launch_arguments

SUB = 256
"""Columns of a sub-chunk."""
SUBS_PER_CHUNK = 16
CHUNK = SUB * SUBS_PER_CHUNK
_SUB, _SUBS_PER_CHUNK, _CHUNK = tl.constexpr(SUB), tl.constexpr(SUBS_PER_CHUNK), tl.constexpr(CHUNK)


class LogitStatistics(NamedTuple):
    """Statistics of R rows, divided by the temperature.

    For any m, the softmax of a row is exp(logit - m) / sum_c chunk_sums[c] * exp(chunk_maxima[c] - m).
    """

    best: Tensor
    """Largest key of each sub-chunk, fp32 [R, sub-chunks]; see `load_keys`."""
    chunk_maxima: Tensor
    """Largest logit of each chunk, fp32 [R, chunks]."""
    chunk_sums: Tensor
    """sum exp(logit - maximum) of each chunk, fp32 [R, chunks]."""


@triton.jit
def inverse_temperature(temperature_ptr, sequence, WARM: tl.constexpr):
    """1 / temperature of a sequence, 1 unless WARM."""
    one = tl.full((), 1.0, tl.float32)
    inverse = one
    if WARM:
        inverse = tl.div_rn(one, tl.load(temperature_ptr + sequence).to(tl.float32))
    return inverse


@triton.jit
def load_keys(logits_ptr, noise_ptr, offsets, mask, inverse, HAS_NOISE: tl.constexpr):
    """Logits divided by the temperature, and the keys that order the entries of a row.

    The keys are the logits. With exponential noise E, they are minus the logarithm of the arrival time
    E / exp(logit). E may be as small as 1e-16. fp32 resolves its logarithm, unlike E itself, with an error of at most
    2e-6, which favors no token.
    """
    logits = tl.load(logits_ptr + offsets, mask=mask, other=float("-inf")).to(tl.float32) * inverse
    if HAS_NOISE:
        noise = tl.load(noise_ptr + offsets, mask=mask, other=1.0)
        keys = logits - tl.log(noise.to(tl.float32))
    else:
        keys = logits
    return logits, keys


# For each sub-chunk: best = max key. For each chunk: m = max logit and sum exp(logit - m). One program takes one chunk.
@triton.jit
def _statistics_kernel(
    logits_ptr,
    noise_ptr,
    best_ptr,
    chunk_maxima_ptr,
    chunk_sums_ptr,
    temperature_ptr,
    rows_per_sequence,
    vocab,
    subs,
    chunks,
    HAS_NOISE: tl.constexpr,
    WARM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    sub = chunk * _SUBS_PER_CHUNK + tl.arange(0, _SUBS_PER_CHUNK)
    # The chunk as a tile [sub-chunks, columns], so that the maxima of the sub-chunks are those of its rows.
    column = sub[:, None] * _SUB + tl.arange(0, _SUB)[None, :]
    inverse = inverse_temperature(temperature_ptr, row // rows_per_sequence, WARM)
    logits, keys = load_keys(logits_ptr, noise_ptr, row * vocab + column, column < vocab, inverse, HAS_NOISE)
    tl.store(best_ptr + row * subs + sub, tl.max(keys, 1), mask=sub < subs)

    maximum = tl.max(tl.max(logits, 1), 0)
    # In a chunk without a possible token, -inf - -inf would be NaN.
    finite = tl.where(maximum == float("-inf"), 0.0, maximum)
    total = tl.sum(tl.sum(tl.exp(logits - finite), 1), 0)
    tl.store(chunk_maxima_ptr + row * chunks + chunk, maximum)
    tl.store(chunk_sums_ptr + row * chunks + chunk, total)


@triton.jit
def row_log_sum_exp(chunk_maxima_ptr, chunk_sums_ptr, row, is_row, chunks, BLOCK_C: tl.constexpr):
    """log sum exp of rows [n] from the statistics of their chunks; 0 where is_row is False."""
    part = tl.arange(0, BLOCK_C)
    parts = row[:, None] * chunks + part[None, :]
    in_parts = is_row[:, None] & (part < chunks)[None, :]
    maxima = tl.load(chunk_maxima_ptr + parts, mask=in_parts, other=float("-inf"))
    sums = tl.load(chunk_sums_ptr + parts, mask=in_parts, other=0.0)
    # log sum exp = M + log sum_c sums_c · exp(maxima_c - M), with M the largest of the maxima.
    maximum = tl.where(is_row, tl.max(maxima, 1), 0.0)
    return maximum + tl.log(tl.where(is_row, tl.sum(sums * tl.exp(maxima - maximum[:, None]), 1), 1.0))


@triton.jit
def softmax_chunk(
    logits_ptr,
    chunk_maxima_ptr,
    chunk_sums_ptr,
    row,
    chunk,
    inverse,
    vocab,
    chunks,
    BLOCK_C: tl.constexpr,
):
    """The columns of one chunk of a row and their softmax, [CHUNK] each; columns from `vocab` on do not exist.

    inverse: 1 / temperature. The third value is sum exp(logit - maximum) over the row, which is NaN if the row defines
    no distribution.
    """
    part = tl.arange(0, BLOCK_C)
    maxima = tl.load(chunk_maxima_ptr + row * chunks + part, mask=part < chunks, other=float("-inf"))
    sums = tl.load(chunk_sums_ptr + row * chunks + part, mask=part < chunks, other=0.0)
    maximum = tl.max(maxima, 0)
    total = tl.sum(sums * tl.exp(maxima - maximum), 0)

    column = chunk * _CHUNK + tl.arange(0, _CHUNK)
    logits = tl.load(logits_ptr + row * vocab + column, mask=column < vocab).to(tl.float32) * inverse
    return column, tl.exp(logits - maximum) / total, total


# out = exp(logit - m) / sum_c chunk_sums[c] * exp(chunk_maxima[c] - m) with m = max_c chunk_maxima[c]. One program
# takes one chunk of a row and combines the statistics of all its chunks again.
@triton.jit
def _softmax_kernel(
    logits_ptr,
    chunk_maxima_ptr,
    chunk_sums_ptr,
    out_ptr,
    faults_ptr,
    fault,
    temperature_ptr,
    rows_per_sequence,
    vocab,
    chunks,
    BLOCK_C: tl.constexpr,
    WATCH: tl.constexpr,
    WARM: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column, probabilities, total = softmax_chunk(
        logits_ptr,
        chunk_maxima_ptr,
        chunk_sums_ptr,
        row,
        tl.program_id(1),
        inverse_temperature(temperature_ptr, row // rows_per_sequence, WARM),
        vocab,
        chunks,
        BLOCK_C,
    )
    tl.store(out_ptr + row * vocab + column, probabilities, mask=column < vocab)
    if WATCH:
        tl.store(faults_ptr + row // rows_per_sequence, fault, mask=total != total)


def logit_statistics(logits: Tensor, temperature: Tensor | None, noise: Tensor | None = None) -> LogitStatistics:
    """Statistics of contiguous logits [B, ..., V] in fp32, fp16 or bf16, divided by temperature, fp64 [B]; None is 1.

    noise: contiguous exponential draws, fp64 in the shape of the logits, for the keys. A row that defines no
    distribution has NaN among its sums, or -inf as its only maximum.
    """
    vocab = logits.shape[-1]
    rows = logits.numel() // vocab
    # Two levels: softmax needs few numbers per row, the selection of large entries fine ones.
    subs = triton.cdiv(vocab, SUB)
    chunks = triton.cdiv(vocab, CHUNK)

    # Every entry is written by exactly one program, so nothing is initialized.
    best = torch.empty(rows, subs, device=logits.device)
    chunk_maxima, chunk_sums = torch.empty(2, rows, chunks, device=logits.device)

    _statistics_kernel[(rows, chunks)](
        *(logits, noise, best, chunk_maxima, chunk_sums, temperature),
        *(max(1, rows // len(logits)), vocab, subs, chunks),
        HAS_NOISE=noise is not None,
        WARM=temperature is not None,
        num_warps=8,
    )
    return LogitStatistics(best, chunk_maxima, chunk_sums)


def log_sum_exp(logits: Tensor) -> Tensor:
    """See `Backend.log_sum_exp`; each row needs a finite logit."""
    if not logits.numel():
        return logits.new_empty(logits.shape[:-1], dtype=torch.float32)
    # Exact over chunks: LSE = log sum_c exp(chunk maximum_c + log chunk sum_c).
    statistics = logit_statistics(logits.contiguous(), temperature=None)
    return (statistics.chunk_maxima + statistics.chunk_sums.log()).logsumexp(-1).view(logits.shape[:-1])


def softmax(logits: Tensor, temperature: Tensor | None, watch: Watch | None = None) -> Tensor:
    """See `Backend.softmax`."""
    logits = logits.contiguous()
    statistics = logit_statistics(logits, temperature)
    vocab = logits.shape[-1]
    out = torch.empty(logits.shape, device=logits.device)
    rows, chunks = statistics.chunk_sums.shape
    _softmax_kernel[(rows, chunks)](
        *(logits, *statistics[1:], out, *launch_arguments(watch), temperature),
        *(rows // len(logits), vocab, chunks),
        BLOCK_C=triton.next_power_of_2(chunks),
        WATCH=watch is not None,
        WARM=temperature is not None,
        num_warps=8,
    )
    return out
