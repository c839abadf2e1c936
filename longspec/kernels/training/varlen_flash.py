"""Training attention on FlashAttention: flash-attn where it is installed, else FlashAttention-2 as torch builds it.

A lag needs no mask: causal attention of T queries and T - lag keys aligns their ends, so query i sees keys up to
i - lag. The target's pass, which has no backward, runs on the forward of FlashAttention-3 (package fa3-fwd) on Hopper.
"""

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from longspec.errors import first_line
from longspec.kernels.shared.device import OLDEST_GPU
from longspec.kernels.training.segments import Segments

logger = logging.getLogger(__name__)

FLASH_MODULES = {"flash_attention_3": "flash_attn_interface", "flash_attention_2": "flash_attn"}
"""Modules that offer flash_attn_varlen_func, fastest first."""
FORWARD_MODULE = "fa3_fwd_interface"
"""FlashAttention-3 without backward and windows, in bf16."""
MAX_HEAD_DIM = 256


def takes(q: Tensor, segments: Segments, window: int | None) -> bool:
    """Whether these queries can run here: in half precision on CUDA, with any key to see, all lagging alike in a
    window."""
    lag = segments.common_lag
    return (
        runs(q.device, q.dtype, q.shape[-1])
        and segments.keys.longest > 0
        and (window is None or (lag is not None and lag <= window))
    )


def runs(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether heads of this kind can run here, whatever the segments are."""
    return (
        device.type == "cuda"
        and _torch_has_flash(device)
        and dtype in (torch.float16, torch.bfloat16)
        and head_dim <= MAX_HEAD_DIM
        and head_dim % 8 == 0
    )


@cache
def _torch_has_flash(device: torch.device) -> bool:
    # Before torch 2.7, and in its builds for AMD, the LSE of segments is laid out otherwise.
    lse_is_packed = torch.__version__ >= "2.7" and torch.version.hip is None
    new_enough = torch.cuda.get_device_capability(device)[0] >= OLDEST_GPU
    return lse_is_packed and new_enough and torch.backends.cuda.is_flash_attention_available()


def attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None, use_flash: bool
) -> Tensor:
    """See `varlen.varlen_attention`."""
    plain = window is None and segments.common_lag == 0
    has_backward = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    flash: Callable[..., Any] | None = None
    if plain and not has_backward and q.dtype == torch.bfloat16:
        flash = _forward_only(q.device)
    if flash is None and use_flash:
        flash = _installed_varlen()
    reach = -1 if window is None else window - segments.lags[0]
    return _run(flash or _torch_varlen, q, k, v, segments, scale, reach)


def _run(
    flash: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, reach: int
) -> Tensor:
    """One varlen call; each query sees the `reach` keys (-1: all) before the last one it may see."""
    keys = segments.keys
    if keys.rows is not None:
        k, v = k.index_select(0, keys.rows), v.index_select(0, keys.rows)
    out = flash(
        q,
        k,
        v,
        cu_seqlens_q=segments.query_bounds,
        cu_seqlens_k=keys.bounds,
        max_seqlen_q=segments.longest,
        max_seqlen_k=keys.longest,
        softmax_scale=scale,
        causal=True,
        window_size=(reach, -1 if reach < 0 else 0),
    )
    return out[0] if isinstance(out, tuple) else out


def installed_flash_attention() -> str | None:
    """Name of the flash-attn generation that training runs on CUDA in half precision, None if there is none."""
    return next((name for name, module in FLASH_MODULES.items() if importlib.util.find_spec(module)), None)


@cache
def _installed_varlen() -> Callable[..., Any] | None:
    name = installed_flash_attention()
    return importlib.import_module(FLASH_MODULES[name]).flash_attn_varlen_func if name else None


@cache
def _forward_only(device: torch.device) -> Callable[..., Any] | None:
    if torch.cuda.get_device_capability(device)[0] != 9 or importlib.util.find_spec(FORWARD_MODULE) is None:
        return None
    try:
        return importlib.import_module(FORWARD_MODULE).flash_attn_varlen_func
    except (ImportError, OSError) as error:
        logger.warning("%s does not load with this torch: %s", FORWARD_MODULE, first_line(error))
        return None


class _Call(NamedTuple):
    """What a call of torch's kernels has beside queries, keys and values."""

    query_bounds: Tensor
    key_bounds: Tensor
    max_queries: int
    max_keys: int
    scale: float
    reach: int = -1

    @property
    def options(self) -> dict[str, Any]:
        window = (None, None) if self.reach < 0 else (self.reach, 0)
        return {"scale": self.scale, "window_size_left": window[0], "window_size_right": window[1]}


def _forward(q: Tensor, k: Tensor, v: Tensor, call: _Call) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """o [N, Hq, D]; natural-log LSE fp32 [Hq, N], infinite for a query that sees nothing; what backward wants back."""
    given = (q, k, v, *call[:4], 0.0, True, False)
    return torch.ops.aten._flash_attention_forward(*given, **call.options)[:4]


def _backward(
    upstream: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    state: Sequence[Tensor],
    call: _Call,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, where exp(score - lse) is the weight of a key and `out` what all weights make."""
    given = (upstream.contiguous(), q, k, v, out, lse, *call[:4], 0.0, True, *state)
    return torch.ops.aten._flash_attention_backward(*given, **call.options)


class _TorchFlash(torch.autograd.Function):
    """The operations that lie behind torch's scaled_dot_product_attention; as such they take segments and windows."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: _Call) -> Tensor:
        out, lse, *state = _forward(q, k, v, call)
        ctx.save_for_backward(q, k, v, out, lse, *state)
        ctx.call = call
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse, *state = ctx.saved_tensors
        return *_backward(upstream, q, k, v, out, lse, state, ctx.call), None


def _torch_varlen(q: Tensor, k: Tensor, v: Tensor, **given: Any) -> Tensor:
    """As flash_attn_varlen_func, causal."""
    bounds = given["cu_seqlens_q"], given["cu_seqlens_k"], given["max_seqlen_q"], given["max_seqlen_k"]
    return _TorchFlash.apply(q, k, v, _Call(*bounds, given["softmax_scale"], given["window_size"][0]))


def block_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, block: int) -> Tensor:
    """See `varlen.block_attention`; `segments` lag by `block`."""
    return _BlockFlash.apply(q, k, v, segments, scale, block)


class _BlockFlash(torch.autograd.Function):
    """The block pattern without a mask: what lies a block or more behind a query (far) is one causal call that lags;
    nearer than that a query sees at most block - 1 keys, one at each distance 1 … block - 1, which torch's own
    operations add. The two parts are merged by their log-sum-exp.

    In backward a weight is exp(score - lse) of the whole, so each part takes its gradient from the whole's `out` and
    `lse` on its own, as the parts of ring attention do (arXiv 2310.01889).
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, block: int) -> Tensor:
        keys = segments.keys
        assert keys.rows is not None
        call = _Call(segments.query_bounds, keys.bounds, segments.longest, keys.longest, scale)
        far, far_lse, *state = _forward(q, k.index_select(0, keys.rows), v.index_select(0, keys.rows), call)
        seen = (segments.offsets >= block)[:, None]
        near = [scores for _, scores in _near_scores(q, k, segments.offsets, scale, block)]
        parts = torch.stack([far_lse.T.masked_fill(~seen, -torch.inf), *near])
        lse = parts.logsumexp(0).masked_fill(~seen, torch.inf)
        weights = (parts - lse).exp()[..., None]
        out = weights[0] * far
        for distance, weight in enumerate(weights[1:], start=1):
            out += _per_query_head(v.roll(distance, 0), q) * weight
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse.T.contiguous(), *state)
        ctx.call, ctx.segments, ctx.block = call, segments, block
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, out, lse, *state = ctx.saved_tensors
        segments, scale, rows = ctx.segments, ctx.call.scale, ctx.segments.keys.rows
        far = k.index_select(0, rows), v.index_select(0, rows)
        dq, *far_gradients = _backward(upstream, q, *far, out, lse, state, ctx.call)
        dq = dq.to(lse.dtype)
        keys_learn = any(ctx.needs_input_grad[1:3])  # not in training, where they are the frozen target's
        dk, dv = (torch.zeros_like(x).index_copy_(0, rows, part) for x, part in zip((k, v), far_gradients, strict=True))
        wide = upstream.to(lse.dtype)
        mean = (wide * out).sum(-1)
        for distance, scores in _near_scores(q, k, segments.offsets, scale, ctx.block):
            weight = (scores - lse.T).exp()
            back = [_per_query_head(x.roll(distance, 0), q) for x in (k, v)]
            slope = (weight * ((wide * back[1]).sum(-1) - mean) * scale)[..., None]
            dq += slope * back[0]
            if keys_learn:
                dk += _per_kv_head(slope * q, k).roll(-distance, 0)
                dv += _per_kv_head(weight[..., None] * wide, v).roll(-distance, 0)
        return dq.to(q.dtype), dk, dv, None, None, None


def _near_scores(q: Tensor, k: Tensor, offsets: Tensor, scale: float, block: int) -> Iterator[tuple[int, Tensor]]:
    """Each distance 1 … block - 1 with the scores [N, Hq], fp32 or wider, of the keys so far behind their queries.

    A query at offset i sees that key if it lies in an earlier block: i % block < distance, and not in the first block.
    """
    wide = q.to(torch.promote_types(q.dtype, torch.float32))
    for distance in range(1, block):
        scores = (wide * _per_query_head(k.roll(distance, 0), q)).sum(-1) * scale
        seen = (offsets % block < distance) & (offsets >= block)
        yield distance, scores.masked_fill(~seen[:, None], -torch.inf)


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """[N, Hkv, D] -> [N, Hq, D]"""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _per_kv_head(x: Tensor, k: Tensor) -> Tensor:
    """[N, Hq, D] -> [N, Hkv, D] in k's dtype, summed over the query heads of each KV head."""
    return x.unflatten(1, (k.shape[1], -1)).sum(2).to(k.dtype)
