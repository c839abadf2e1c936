"""Attention of training over packed segments; differentiable.

Shape letters: N flattened tokens, S segments, Hq query heads, Hkv KV heads, D head_dim, G segments of one call,
T tokens of one segment. A lag shifts the causal mask: the query at offset i of its segment sees keys up to i - lag,
which is causal attention between queries lag … and keys 0 …, so no call needs a mask of tokens x tokens.
"""

import importlib
import importlib.util
from collections import defaultdict
from collections.abc import Callable, Iterable
from functools import cache, partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

FLASH_MODULES = {"flash_attention_2": "flash_attn", "flash_attention_3": "flash_attn_interface"}
"""Modules that offer flash_attn_varlen_func, in the order in which they are tried."""
FLASH_MAX_HEAD_DIM = 256
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


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int | None = None,
    lags: Tensor | None = None,
    use_flash: bool = True,
) -> Tensor:
    """Causal attention within each segment, with a window, a lag per segment, or both.

    q [N, Hq, D]; k, v [N, Hkv, D]; cu_seqlens int [S + 1] from 0 to N; lags int [S] or None = 0. The query at offset
    i of a segment sees keys at offsets i - window … i - lag (flash noisy training is a lag without a window).
    Returns o [N, Hq, D]; a query that sees nothing gets 0. cu_seqlens and lags are read on the host.
    Raises ValueError if cu_seqlens does not run from 0 to N.
    """
    spans = _spans(q, cu_seqlens, lags)
    if window is not None:
        spans = [span for span in spans if span.lag <= window]
    same_lag = len({span.lag for span in spans}) == 1
    if use_flash and spans and (window is None or same_lag) and (flash := _flash_varlen(q)):
        return _flash_attention(flash, q, k, v, spans, scale, window)
    groups: dict[tuple[int, int | None], list[Span]] = defaultdict(list)
    for span in spans:
        reach = None if window is None else window - span.lag
        groups[-(-span.queries // BUCKET), reach].append(span)
    calls = [(group, partial(_windowed, scale=scale, window=reach)) for (_, reach), group in groups.items()]
    return _run(q, k, v, calls)


def block_attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, block: int = 4) -> Tensor:
    """GLIDE's block cross-attention: query i of a segment sees keys j with j // block < i // block.

    Shapes as in `varlen_attention`; the first block of a segment sees nothing and gets 0.
    """
    lags = torch.full((len(cu_seqlens) - 1,), block)
    groups: dict[int, list[Span]] = defaultdict(list)
    for span in _spans(q, cu_seqlens, lags):
        groups[-(-span.queries // BUCKET)].append(span)
    # Queries start one block late, so the mask left over is: key block <= query block.
    calls = [(group, partial(_block_causal, scale=scale, block=block)) for group in groups.values()]
    return _run(q, k, v, calls, round_keys=block)


def _spans(q: Tensor, cu_seqlens: Tensor, lags: Tensor | None) -> list[Span]:
    bounds = cu_seqlens.tolist()
    if bounds[0] != 0 or bounds[-1] != len(q):
        raise ValueError(f"cu_seqlens must run from 0 to {len(q)} tokens, not from {bounds[0]} to {bounds[-1]}")
    host_lags = [0] * (len(bounds) - 1) if lags is None else lags.tolist()
    segments = zip(pairwise(bounds), host_lags, strict=True)
    return [Span(start, end - start - lag, lag) for (start, end), lag in segments if end - start > lag]


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


def _flash_varlen(q: Tensor) -> Callable[..., Any] | None:
    """flash-attn's varlen function where it is installed and can take q."""
    if not q.is_cuda or q.dtype not in (torch.float16, torch.bfloat16) or q.shape[-1] > FLASH_MAX_HEAD_DIM:
        return None
    return _load_flash_varlen()


def installed_flash_attention() -> str | None:
    """Name of the flash-attn generation that training runs on CUDA in half precision, None if there is none."""
    return next((name for name, module in FLASH_MODULES.items() if importlib.util.find_spec(module)), None)


@cache
def _load_flash_varlen() -> Callable[..., Any] | None:
    name = installed_flash_attention()
    return importlib.import_module(FLASH_MODULES[name]).flash_attn_varlen_func if name else None


def _flash_attention(
    flash: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, spans: list[Span], scale: float, window: int | None
) -> Tensor:
    """One varlen call over the shifted slices of all spans; with a window all spans have the same lag."""
    counts = torch.tensor([span.queries for span in spans])
    bounds = F.pad(counts.cumsum(0), (1, 0)).to(q.device, torch.int32)
    starts = torch.cat([torch.arange(span.start, span.start + span.queries) for span in spans])
    key_rows = starts.to(q.device)
    query_rows = (starts + torch.tensor([span.lag for span in spans]).repeat_interleave(counts)).to(q.device)
    reach = -1 if window is None else window - spans[0].lag
    out = flash(
        q.index_select(0, query_rows),
        k.index_select(0, key_rows),
        v.index_select(0, key_rows),
        cu_seqlens_q=bounds,
        cu_seqlens_k=bounds,
        max_seqlen_q=int(counts.max()),
        max_seqlen_k=int(counts.max()),
        softmax_scale=scale,
        causal=True,
        window_size=(reach, -1 if window is None else 0),
    )
    out = out[0] if isinstance(out, tuple) else out
    return torch.zeros_like(q).index_copy(0, query_rows, out)
