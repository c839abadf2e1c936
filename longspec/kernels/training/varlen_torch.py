"""Training attention on torch's scaled_dot_product_attention, segment by segment, for any device and dtype.

Shape letters are those of CONTRIBUTING.md; N counts flattened tokens, T the tokens of a segment. The query at offset i
of a segment sees the keys up to i - lag, which is plain causal attention between the queries from offset `lag` on and
the keys from offset 0 on.
"""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from longspec.kernels.training.segments import BLOCK, Segments

CHUNK = 256
"""Queries per chunk of attention with a window, with blocks or of a step of training-time test."""


class TorchAttention:
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

    def steps(
        self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], segments: Segments, scale: float, window: int
    ) -> Tensor:
        """Attention of the newest step s of EAGLE-3's training-time test. keys, values: [N, K, D] of each step so far.

        The query at offset i of a segment sees the keys of step 1 at offsets max(1, i - window) … i - s + 1, and one
        key of each later step m: that at offset i - s + m, if this is not negative. In step 1 the query at offset 0
        sees its own key. Returns [N, H, D]. Errors as in `varlen`."""
        segments.check(len(q))
        outputs = [q[:0]]
        # Split once, because the gradient of each slice is as large as that of the whole.
        parts = zip(*(x.split(segments.lengths) for x in (q, *keys, *values)), strict=True)
        for queries, *others in parts:
            own_keys, own_values = (
                [_repeat_heads(x.transpose(0, 1)[None], q.shape[1]) for x in part]
                for part in (others[: len(keys)], others[len(keys) :])
            )
            attend = partial(_attend_steps, queries.transpose(0, 1)[None], own_keys, own_values, scale, window)
            starts = range(0, max(1, len(queries)), CHUNK)
            # Without this, backward would keep a copy of the keys and values of each chunk.
            if torch.is_grad_enabled() and len(starts) > 1:
                attend = partial(checkpoint, attend, use_reentrant=False, preserve_rng_state=False)
            outputs.append(torch.cat([attend(start) for start in starts], 2)[0].transpose(0, 1))
        return torch.cat(outputs)


def _run(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None = None, block: int = 1
) -> Tensor:
    """`TorchAttention.varlen`, where a query also sees the other keys of its newest key's block."""
    segments.check(len(q))
    outputs = [q[:0]]  # keeps the result differentiable if no query sees a key
    for start, length, lag in zip(segments.bounds[:-1], segments.lengths, segments.lags, strict=True):
        # Among the visible keys of a query, those from i - window to i - lag: `reach` before the newest one.
        reach = None if window is None else window - lag
        blind = length if reach is not None and reach < 0 else min(lag, length)
        outputs.append(torch.zeros_like(q[:blind]))
        if blind < length:
            # Whole blocks of keys. Row i of the queries is at offset lag + i, row j of the keys at offset j.
            keys = slice(start, start - (lag - length) // block * block)
            flat = (q[start + lag : start + length], k[keys], v[keys])
            queries, seen, values = (x.transpose(0, 1)[None] for x in flat)
            outputs.append(_causal(queries, seen, values, scale, reach, block)[0].transpose(0, 1))
    return torch.cat(outputs)


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


def _attend_steps(
    q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], scale: float, window: int, start: int
) -> Tensor:
    """`TorchAttention.steps` for the queries start … start + CHUNK - 1 of a segment; [1, H, T, D] each."""
    back = len(keys) - 1  # of the newest key of step 1
    end = min(start + CHUNK, q.shape[2])
    query = torch.arange(start, end, device=q.device)[:, None]

    def span(first: int, last: int) -> tuple[slice, Tensor]:
        """The keys first … last - 1, and how far each of them is before each query."""
        first = max(0, first)
        last = max(first, last)
        return slice(first, last), query - torch.arange(first, last, device=q.device)

    first, distance = span(start - window, end - back)
    spans = [first]
    # The first token has no key in step 1. Its query sees itself, so that the softmax is defined.
    masks = [(distance >= back) & (distance <= window) & ((distance < query) | (distance == 0))]
    for step in range(1, back + 1):  # one key of each later step
        own, distance = span(start - back + step, end - back + step)
        spans.append(own)
        masks.append(distance == back - step)
    k, v = (torch.cat([x[:, :, own] for x, own in zip(part, spans, strict=True)], 2) for part in (keys, values))
    return F.scaled_dot_product_attention(q[:, :, start:end], k, v, attn_mask=torch.cat(masks, 1), scale=scale)


def _repeat_heads(x: Tensor, heads: int) -> Tensor:
    """[1, K, T, D] -> [1, heads, T, D]. With grouped heads torch would compute dense scores outside of flash-attn."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def on_flat(attention: Callable[[Tensor, Tensor, Tensor], Tensor], q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Run a varlen attention on tensors [B, H, T, D]; it takes flattened tokens [B·T, H, D]."""
    return attention(*map(flattened, (q, k, v))).unflatten(0, (q.shape[0], -1)).transpose(1, 2)


def flattened(x: Tensor) -> Tensor:
    """[B, H, T, D] -> [B·T, H, D]"""
    return x.transpose(1, 2).flatten(0, 1)
