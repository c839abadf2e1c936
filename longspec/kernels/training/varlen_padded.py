"""Training attention on torch's scaled_dot_product_attention, for any device and dtype.

Segments of similar lengths are padded to one batch. Shape letters are those of CONTRIBUTING.md; N counts flattened
tokens, G the segments of one batch, T the tokens of a padded segment. The query at offset i of a segment sees the keys
up to i - lag, which is plain causal attention between the queries from offset `lag` on and the keys from offset 0 on.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspec.kernels.training.segments import BLOCK, Segments

BUCKET = 64
"""Segments whose lengths round up to the same multiple of this are padded to one batch."""
WINDOW_CHUNK = 256
"""Queries per chunk of attention with a window."""
BLOCK_CHUNK = 512
"""Queries per chunk of block attention, rounded down to whole blocks."""

AttendPadded = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(q [G, H, T, D], k, v [G, K, T', D]) -> [G, H, T, D]; padding is at the end and invisible to real queries."""


class Span(NamedTuple):
    """The queries of a segment that see any key."""

    start: int
    """First token of the segment; keys start here, queries at start + lag."""
    queries: int
    """Number of queries."""
    lag: int


class PaddedAttention:
    """Attention over packed segments; differentiable. N counts flattened tokens: q [N, H, D]; k, v [N, K, D]."""

    def varlen(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None = None
    ) -> Tensor:
        """Causal attention within each segment, optionally with a window and a lag per segment.

        The query at offset i of a segment sees the keys at offsets i - window … i - lag. (Flash noisy training is a lag
        without a window.) Returns [N, H, D]; a query that sees no key gets 0. Raises ValueError unless the segments
        cover N tokens.
        """
        segments.check(len(q))
        # Segments of one bucket are padded by at most BUCKET - 1 tokens.
        groups: dict[tuple[int, int | None], list[Span]] = defaultdict(list)
        for span in _spans(segments):
            # Among the visible keys of a query, those from i - window to i - lag: `reach` before the newest one.
            reach = None if window is None else window - span.lag
            if reach is None or reach >= 0:
                groups[-(-span.queries // BUCKET), reach].append(span)

        batches = []
        for (_, reach), spans in groups.items():
            batches.append((spans, partial(_windowed, scale=scale, reach=reach)))
        return _run(q, k, v, batches)

    def block(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, block: int = BLOCK) -> Tensor:
        """GLIDE's block cross-attention: query i of a segment sees the keys j with j // block < i // block.

        Errors as in `varlen`; lags are ignored. The first block of a segment sees no key and gets 0.
        """
        segments.check(len(q))
        groups: dict[int, list[Span]] = defaultdict(list)
        # Every key at a distance of `block` or more is visible.
        for span in _spans(segments.all_lagging(block)):
            groups[-(-span.queries // BUCKET)].append(span)

        # The queries start one block late, so "key block < query block" becomes "key block <= query block".
        attend = partial(_block_causal, scale=scale, block=block)
        batches = [(spans, attend) for spans in groups.values()]
        return _run(q, k, v, batches, round_keys=block)


def _spans(segments: Segments) -> list[Span]:
    starts = segments.bounds[:-1]
    sizes = zip(starts, segments.lengths, segments.lags, strict=True)
    return [Span(start, length - lag, lag) for start, length, lag in sizes if length > lag]


def _run(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    batches: Iterable[tuple[list[Span], AttendPadded]],
    round_keys: int = 1,
) -> Tensor:
    """Attention of each padded batch, written to the rows of its tokens; all other rows are 0.

    round_keys: the number of keys is rounded up to a multiple of this.
    """
    outputs = [q[:0]]
    rows = [torch.empty(0, dtype=torch.long)]
    for spans, attend in batches:
        # Query i of the batch is at offset lag + i, key j at offset j: plain causal attention.
        key_starts = torch.tensor([span.start for span in spans])[:, None]
        query_starts = key_starts + torch.tensor([span.lag for span in spans])[:, None]
        counts = torch.tensor([span.queries for span in spans])[:, None]
        width = int(counts.max())
        key_offsets = torch.arange(-(-width // round_keys) * round_keys)
        query_offsets = key_offsets[:width]

        padded_q = _gather(q, query_starts + query_offsets)
        padded_k = _gather(k, key_starts + key_offsets)
        padded_v = _gather(v, key_starts + key_offsets)
        out = attend(padded_q, padded_k, padded_v)

        # Keep the real tokens of [G, H, T, D] only.
        real = (query_offsets < counts).flatten().nonzero()[:, 0]
        outputs.append(out.transpose(1, 2).flatten(0, 1).index_select(0, real.to(q.device)))
        rows.append((query_starts + query_offsets).flatten()[real])
    # Queries without a visible key keep 0.
    return torch.zeros_like(q).index_copy(0, torch.cat(rows).to(q.device), torch.cat(outputs))


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    """x [N, H, D] at rows [G, T] -> [G, H, T, D]; rows past the end (padding) repeat the last token."""
    picked = x.index_select(0, rows.clamp(max=len(x) - 1).flatten().to(x.device))
    return picked.unflatten(0, rows.shape).transpose(1, 2)


def _windowed(q: Tensor, k: Tensor, v: Tensor, scale: float, reach: int | None) -> Tensor:
    """Causal attention where query i sees the keys i - reach … i (None: all up to i).

    Long segments run in chunks, so that memory is linear in the length.
    """
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    length = q.shape[2]
    if reach is None or length <= reach + 1:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    # The first `reach` queries see all earlier keys.
    head = F.scaled_dot_product_attention(
        q[:, :, :reach], k[:, :, :reach], v[:, :, :reach], is_causal=True, scale=scale
    )

    # The others go in chunks of WINDOW_CHUNK queries, each with WINDOW_CHUNK + reach keys under the same band mask.
    chunks = -(-(length - reach) // WINDOW_CHUNK)
    padding = chunks * WINDOW_CHUNK + reach - length
    keys = _sliding_chunks(F.pad(k, (0, 0, 0, padding)), reach)
    values = _sliding_chunks(F.pad(v, (0, 0, 0, padding)), reach)
    queries = _sliding_chunks(F.pad(q[:, :, reach:], (0, 0, 0, padding)), 0)
    band = torch.ones(WINDOW_CHUNK, WINDOW_CHUNK + reach, dtype=torch.bool, device=q.device)
    # Query i of a chunk sees its keys i … i + reach.
    band = band.triu().tril(reach)
    tail = F.scaled_dot_product_attention(queries, keys, values, attn_mask=band, scale=scale)

    # [G * chunks, H, WINDOW_CHUNK, D] -> [G, H, chunks * WINDOW_CHUNK, D]
    tail = tail.unflatten(0, (-1, chunks)).transpose(1, 2).flatten(2, 3)
    return torch.cat([head, tail[:, :, : length - reach]], 2)


def _sliding_chunks(x: Tensor, overlap: int) -> Tensor:
    """[G, H, T, D] -> [G * chunks, H, WINDOW_CHUNK + overlap, D]; chunks start WINDOW_CHUNK tokens apart."""
    chunks = x.unfold(2, WINDOW_CHUNK + overlap, WINDOW_CHUNK)
    return chunks.permute(0, 2, 1, 4, 3).flatten(0, 1)


def _block_causal(q: Tensor, k: Tensor, v: Tensor, scale: float, block: int) -> Tensor:
    """Attention where query i sees the keys j with j // block <= i // block, in chunks of queries.

    Backward recomputes the chunks one at a time, so that only one mask is in memory.
    """
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    step = max(1, BLOCK_CHUNK // block) * block
    length = q.shape[2]

    def attend_chunk(first: int, q_chunk: Tensor, k_chunk: Tensor, v_chunk: Tensor) -> Tensor:
        # `first` is a multiple of `block`, so blocks never cross a chunk.
        query_blocks = torch.arange(first, first + q_chunk.shape[2], device=q.device) // block
        key_blocks = torch.arange(k_chunk.shape[2], device=q.device) // block
        mask = key_blocks <= query_blocks[:, None]
        return F.scaled_dot_product_attention(q_chunk, k_chunk, v_chunk, attn_mask=mask, scale=scale)

    if length <= step:
        return attend_chunk(0, q, k, v)

    chunks = []
    for first in range(0, length, step):
        end = first + step
        inputs = (first, q[:, :, first:end], k[:, :, :end], v[:, :, :end])
        chunks.append(checkpoint(attend_chunk, *inputs, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(chunks, 2)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[G, K, T, D] -> [G, heads, T, D]. With grouped heads torch would compute dense scores outside of flash-attn."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def on_flat(attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run a varlen attention on tensors [B, H, T, D]; it takes flattened tokens [B·T, H, D]."""
    flat = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    return attention(*flat).unflatten(0, (q.shape[0], -1)).transpose(1, 2)
