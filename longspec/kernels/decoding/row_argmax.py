"""The argmax of each row of a large vocabulary, by many programs a row: plain, or of a race."""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.shared.logit_statistics import CHUNK
from longspec.kernels.shared.watch import Watch, launch_arguments


@triton.jit
def _chunk_kernel(values_ptr, noise_ptr, best_ptr, place_ptr, vocab, chunks, CHUNK: tl.constexpr, RACE: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    values = tl.load(values_ptr + row * vocab + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    if RACE:
        noise = tl.load(noise_ptr + row * vocab + column, mask=column < vocab, other=1.0)
        values = values / noise.to(tl.float32)
    # NaN counts as infinity: it wins, so the row shows it, and the index stays within the vocabulary.
    values = tl.where(values < float("inf"), values, float("inf"))
    best, place = tl.max(values, 0, return_indices=True)
    tl.store(best_ptr + row * chunks + chunk, best)
    tl.store(place_ptr + row * chunks + chunk, chunk * CHUNK + place)


@triton.jit
def _row_kernel(
    best_ptr,
    place_ptr,
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
    best = tl.load(best_ptr + row * chunks + chunk, mask=chunk < chunks, other=float("-inf"))
    largest, winner = tl.max(best, 0, return_indices=True)
    tl.store(out_ptr + row, tl.load(place_ptr + row * chunks + winner).to(tl.int64))
    if WATCH:
        is_finite = (largest > float("-inf")) & (largest < float("inf"))
        tl.store(faults_ptr + row // rows_per_sequence, fault, mask=is_finite == 0)


def argmax(values: Tensor, noise: Tensor | None = None, watch: Watch | None = None) -> Tensor:
    """Place of the largest of values [..., V] (any float dtype but fp64), or of values / noise (fp64), the first of
    equal ones: LongTensor [...].

    With `watch`, values are logits [B, ..., V]: a row without a finite maximum is recorded (see `watch.Watch`).
    """
    vocab = values.shape[-1]
    rows = values.numel() // vocab
    chunks = triton.cdiv(vocab, CHUNK)
    best = torch.empty(rows, chunks, device=values.device)
    place = torch.empty(rows, chunks, dtype=torch.int32, device=values.device)
    out = torch.empty(values.shape[:-1], dtype=torch.long, device=values.device)
    _chunk_kernel[(rows, chunks)](
        values.contiguous(),
        None if noise is None else noise.contiguous(),
        best,
        place,
        vocab,
        chunks,
        CHUNK=CHUNK,
        RACE=noise is not None,
        num_warps=8,
    )
    _row_kernel[(rows,)](
        best,
        place,
        out,
        *launch_arguments(watch),
        chunks,
        rows // len(values),
        BLOCK_C=triton.next_power_of_2(chunks),
        WATCH=watch is not None,
        num_warps=1,
    )
    return out
