"""Training attention on torch's scaled_dot_product_attention, for any device and dtype: segments of like length are
padded together.

Shape letters: N flattened tokens, Hq query heads, Hkv KV heads, D head_dim, G segments of one call, T tokens of one
segment. The query at offset i of its segment sees keys up to i - lag, which is causal attention between queries
lag … and keys 0 ….
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspec.kernels.training.segments import Segments

BUCKET = 64
"""Segments whose lengths round up to the same multiple of this are padded together and run in one call."""
WINDOW_CHUNK = 256
BLOCK_CHUNK = 512

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [G, Hq, T, D], k, v [G, Hkv, T', D] -> [G, Hq, T, D], where padding lies at the end and is never seen."""


class Span(NamedTuple):
    """The queries of a segment that see any key: `queries` of them from `start + lag`, with keys from `start`."""

    start: int
    queries: int
    lag: int


def attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None) -> Tensor:
    """See `varlen.varlen_attention`."""
    groups: dict[tuple[int, int | None], list[Span]] = defaultdict(list)
    for span in _spans(segments):
        reach = None if window is None else window - span.lag
        if reach is None or reach >= 0:
            groups[-(-span.queries // BUCKET), reach].append(span)
    calls = [(group, partial(_windowed, scale=scale, window=reach)) for (_, reach), group in groups.items()]
    return _run(q, k, v, calls)


def block_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, block: int) -> Tensor:
    """See `varlen.block_attention`; `segments` lag by `block`."""
    groups: dict[int, list[Span]] = defaultdict(list)
    for span in _spans(segments):
        groups[-(-span.queries // BUCKET)].append(span)
    # Queries start one block late, so the mask left over is: key block <= query block.
    calls = [(group, partial(_block_causal, scale=scale, block=block)) for group in groups.values()]
    return _run(q, k, v, calls, round_keys=block)


def _spans(segments: Segments) -> list[Span]:
    found = zip(segments.bounds, segments.lengths, segments.lags, strict=False)
    return [Span(start, length - lag, lag) for start, length, lag in found if length > lag]


def _run(q: Tensor, k: Tensor, v: Tensor, calls: Iterable[tuple[list[Span], Attend]], round_keys: int = 1) -> Tensor:
    """Run each group of spans as one padded batch and put the results back in their tokens' rows."""
    outputs, rows = [q[:0]], [torch.empty(0, dtype=torch.long)]
    for spans, attend in calls:
        starts = torch.tensor([span.start for span in spans])[:, None]
        shifted = starts + torch.tensor([span.lag for span in spans])[:, None]
        counts = torch.tensor([span.queries for span in spans])[:, None]
        width = int(counts.max())
        offsets = torch.arange(-(-width // round_keys) * round_keys)
        out = attend(_gather(q, shifted + offsets[:width]), _gather(k, starts + offsets), _gather(v, starts + offsets))
        real = (offsets[:width] < counts).flatten().nonzero()[:, 0]
        outputs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, real.to(q.device)))
        rows.append((shifted + offsets[:width]).flatten()[real])
    return torch.zeros_like(q).index_copy(0, torch.cat(rows).to(q.device), torch.cat(outputs))


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    """[N, H, D] and rows [G, T] -> [G, H, T, D]; rows past the end (padding) repeat the last token."""
    picked = x.index_select(0, rows.clamp(max=len(x) - 1).flatten().to(x.device))
    return picked.unflatten(0, rows.shape).transpose(1, 2)


def _windowed(q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
    """Causal attention, query i seeing keys i - window … i; long sequences in chunks, so that memory stays linear."""
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    length = q.shape[2]
    if window is None or length <= window + 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)
    head = F.scaled_dot_product_attention(
        q[:, :, :window], k[:, :, :window], v[:, :, :window], is_causal=True, scale=scale
    )
    chunks = -(-(length - window) // WINDOW_CHUNK)
    padding = chunks * WINDOW_CHUNK + window - length
    keys, values = (_sliding_chunks(F.pad(x, (0, 0, 0, padding)), window) for x in (k, v))
    queries = _sliding_chunks(F.pad(q[:, :, window:], (0, 0, 0, padding)), 0)
    band = torch.ones(WINDOW_CHUNK, WINDOW_CHUNK + window, dtype=torch.bool, device=q.device)
    band = band.triu().tril(window)
    tail = F.scaled_dot_product_attention(queries, keys, values, attn_mask=band, scale=scale)
    tail = tail.unflatten(0, (-1, chunks)).transpose(1, 2).flatten(2, 3)
    return torch.cat([head, tail[:, :, : length - window]], 2)


def _sliding_chunks(x: Tensor, overlap: int) -> Tensor:
    """[G, H, T, D] -> [G * chunks, H, WINDOW_CHUNK + overlap, D], each starting WINDOW_CHUNK after the last."""
    chunks = x.unfold(2, WINDOW_CHUNK + overlap, WINDOW_CHUNK)
    return chunks.permute(0, 2, 1, 4, 3).flatten(0, 1)


def _block_causal(q: Tensor, k: Tensor, v: Tensor, scale: float, block: int) -> Tensor:
    """Query i sees keys j with j // block <= i // block; in chunks that backward recomputes one at a time."""
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    step = max(1, BLOCK_CHUNK // block) * block
    length = q.shape[2]

    def attend_chunk(first: int, q_chunk: Tensor, k_seen: Tensor, v_seen: Tensor) -> Tensor:
        query_blocks = torch.arange(first, first + q_chunk.shape[2], device=q.device) // block
        key_blocks = torch.arange(k_seen.shape[2], device=q.device) // block
        mask = key_blocks <= query_blocks[:, None]
        return F.scaled_dot_product_attention(q_chunk, k_seen, v_seen, attn_mask=mask, scale=scale)

    if length <= step:
        return attend_chunk(0, q, k, v)
    run_chunk = partial(checkpoint, attend_chunk, use_reentrant=False, preserve_rng_state=False)
    firsts = range(0, length, step)
    chunks = [run_chunk(i, q[:, :, i : i + step], k[:, :, : i + step], v[:, :, : i + step]) for i in firsts]
    return torch.cat(chunks, 2)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[G, Hkv, T, D] -> [G, heads, T, D]: outside flash-attn, torch's grouped heads fall back to dense scores."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)
