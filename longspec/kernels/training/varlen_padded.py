"""Training attention on torch's scaled_dot_product_attention, for any device and dtype.

Segments of similar lengths are padded to one batch. Shape letters are those of CONTRIBUTING.md; N counts flattened
tokens, G the segments of one batch, T the tokens of a padded segment. The query at offset i of a segment sees the keys
up to i - lag, which is plain causal attention between the queries from offset `lag` on and the keys from offset 0 on.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspec.kernels.training.segments import BLOCK, Segments

BUCKET = 64
"""Segments whose lengths round up to the same multiple of this are padded to one batch."""
CHUNK = 256
"""Queries per chunk of attention with a window or with blocks."""


class PaddedAttention:
    """Attention over packed segments; differentiable. N counts flattened tokens: q [N, H, D]; k, v [N, K, D]."""

    def varlen(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None = None
    ) -> Tensor:
        """Causal attention within each segment, optionally with a window and a lag per segment. The query at offset i
        of a segment sees the keys at offsets i - window … i - lag. (Flash noisy training is a lag without a window.)
        Returns [N, H, D]; a query that sees no key gets 0. Raises ValueError unless the segments cover N tokens."""
        return _run(q, k, v, segments, scale, window)

    def block(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        """GLIDE's block cross-attention: query i of a segment sees the keys j with j // BLOCK < i // BLOCK. Errors as
        in `varlen`; lags are ignored. The first block of a segment sees no key and gets 0."""
        # Every key at a distance of BLOCK or more is visible. The queries start one block late, so "key block < query
        # block" becomes "key block <= query block".
        return _run(q, k, v, segments.all_lagging(BLOCK), scale, block=BLOCK)


def _run(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None = None, block: int = 1
) -> Tensor:
    """`PaddedAttention.varlen` in padded batches, where a query also sees the other keys of its newest key's block."""
    segments.check(len(q))
    # Segments of one bucket are padded by at most BUCKET - 1 tokens.
    groups: dict[tuple[int, int | None], list[tuple[int, int, int]]] = defaultdict(list)
    for start, length, lag in zip(segments.bounds[:-1], segments.lengths, segments.lags, strict=True):
        # Among the visible keys of a query, those from i - window to i - lag: `reach` before the newest one.
        reach = None if window is None else window - lag
        if length > lag and (reach is None or reach >= 0):
            groups[-(-(length - lag) // BUCKET), reach].append((start, length - lag, lag))

    outputs = [q[:0]]
    rows = [torch.empty(0, dtype=torch.long)]
    for (_, reach), spans in groups.items():
        # Query i of the batch is at offset lag + i, key j at offset j: plain causal attention.
        key_starts, counts, lags = torch.tensor(spans).T[..., None]
        query_starts = key_starts + lags
        width = int(counts.max())
        key_offsets = torch.arange(-(-width // block) * block)
        query_offsets = key_offsets[:width]

        padded_q = _gather(q, query_starts + query_offsets)
        padded_k = _gather(k, key_starts + key_offsets)
        padded_v = _gather(v, key_starts + key_offsets)
        out = _causal(padded_q, padded_k, padded_v, scale, reach, block)

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


def _causal(q: Tensor, k: Tensor, v: Tensor, scale: float, reach: int | None, block: int) -> Tensor:
    """Attention where query i sees the keys j with j // block <= i // block and j >= i - reach (None: all of these).
    Under a mask, it runs in chunks of queries. Backward recomputes a chunk that reads all earlier keys, so that memory
    is linear in the length."""
    k, v = _repeat_heads(k, q.shape[1]), _repeat_heads(v, q.shape[1])
    length = q.shape[2]
    if block == 1 and (reach is None or length <= reach + 1):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale)

    def attend(first: int, first_key: int, q: Tensor, k: Sequence[Tensor], v: Sequence[Tensor]) -> Tensor:
        query = torch.arange(first, first + q.shape[2], device=q.device)[:, None]
        keys = torch.cat(list(k), 2)
        key = torch.arange(first_key, first_key + keys.shape[2], device=q.device)
        mask = key // block <= query // block
        if reach is not None:
            mask &= key >= query - reach
        return F.scaled_dot_product_attention(q, keys, torch.cat(list(v), 2), attn_mask=mask, scale=scale)

    run = attend
    if reach is None and length > CHUNK:
        run = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
    # Chunks are whole blocks. Split once, because the gradient of each slice is as large as that of the whole.
    keys, values = k.split(CHUNK, 2), v.split(CHUNK, 2)
    chunks = []
    for last, queries in enumerate(q.split(CHUNK, 2)):
        first = 0 if reach is None else max(0, last * CHUNK - reach) // CHUNK
        seen = slice(first, last + 1)
        chunks.append(run(last * CHUNK, first * CHUNK, queries, keys[seen], values[seen]))
    return torch.cat(chunks, 2)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[G, K, T, D] -> [G, heads, T, D]. With grouped heads torch would compute dense scores outside of flash-attn."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def on_flat(attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run a varlen attention on tensors [B, H, T, D]; it takes flattened tokens [B·T, H, D]."""
    flat = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
    return attention(*flat).unflatten(0, (q.shape[0], -1)).transpose(1, 2)
