"""Training attention over packed segments: FlashAttention in half precision on CUDA, else torch segment by segment.

FlashAttention is flash-attn if it is installed, else FlashAttention-2 as torch builds it. A lag needs no mask: the
causal mask aligns the ends of T queries and T - lag keys, so query i sees the keys up to i - lag. On Hopper the
target's pass, which has no backward, runs on the forward of FlashAttention-3 (package fa3-fwd). Shape letters are those
of CONTRIBUTING.md; N counts flattened tokens, M segments.
"""

import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from longspec.errors import UserError, first_line, warn_once
from longspec.kernels.shared.device import HOPPER, gpu_generation, plain_gpu
from longspec.kernels.training.segments import BLOCK, Segments
from longspec.kernels.training.varlen_torch import TorchAttention

logger = logging.getLogger(__name__)

FLASH_MODULES = {"flash_attention_3": "flash_attn_interface", "flash_attention_2": "flash_attn"}
"""Modules that provide flash_attn_varlen_func, fastest first."""
FORWARD_MODULE = "fa3_fwd_interface"
"""FlashAttention-3 without backward and without windows, in bf16."""
MAX_HEAD_DIM = 256
"""Largest head_dim of FlashAttention-2."""


def training_attention(device: torch.device, dtype: torch.dtype, head_dim: int, use_flash: bool) -> TorchAttention:
    """The fastest attention for a pair. use_flash: whether to run flash-attn where it is installed."""
    return FlashAttention(use_flash) if runs(device, dtype, head_dim) else TorchAttention()


def resolve_attention(requested: str | None) -> str:
    """The attention that training runs for a config's `attn_implementation`; logs once if a GPU's differs.

    None means "sdpa". Returns "flash_attention_2", "flash_attention_3", "sdpa" or "eager". Raises UserError for any
    other name.
    """
    name = requested or "sdpa"
    known = (*FLASH_MODULES, "sdpa", "eager")
    if name not in known:
        raise UserError(f"attn_implementation: unknown value {requested!r}; choose one of {', '.join(known)}")
    if name not in FLASH_MODULES:
        return name
    # The compute capability is not read here, because that initializes CUDA. `_torch_has_flash` logs an old GPU.
    on_gpu = torch.cuda.is_available() and torch.version.hip is None
    used = (on_gpu and installed_flash_attention()) or "sdpa"
    if used != name and torch.cuda.is_available():
        own = "PyTorch's own attention" if used == "sdpa" else used
        warn_once("attn_implementation: %s cannot be used here; training runs on %s", name, own)
    return used


def runs(device: torch.device, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether FlashAttention runs on the device and takes the dtype and head_dim."""
    return (
        device.type == "cuda"
        and _torch_has_flash(device)
        and dtype in (torch.float16, torch.bfloat16)
        and head_dim <= MAX_HEAD_DIM
        and head_dim % 8 == 0
    )


@cache
def _torch_has_flash(device: torch.device) -> bool:
    if plain := plain_gpu(device):
        warn_once("attention in training runs segment by segment: %s", plain)
        return False
    # Before torch 2.7 the LSE of segments has another layout, as it has on ROCm.
    return torch.__version__ >= "2.7" and torch.backends.cuda.is_flash_attention_available()


class FlashAttention(TorchAttention):
    """On FlashAttention where it takes the segments."""

    def __init__(self, use_flash: bool) -> None:
        """use_flash: whether to run flash-attn where it is installed."""
        self.use_flash = use_flash

    def varlen(
        self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None = None
    ) -> Tensor:
        segments.check(len(q))
        lag = segments.lags[0] if len(set(segments.lags)) == 1 else None
        # A window counts from one lag for all segments.
        if not segments.keys.longest or (window is not None and (lag is None or lag > window)):
            return super().varlen(q, k, v, segments, scale, window)
        plain = window is None and lag == 0
        has_backward = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
        flash: Callable[..., Any] | None = None
        # fa3-fwd is the fastest but has neither backward nor windows; then flash-attn; then torch's own build.
        if plain and not has_backward and q.dtype == torch.bfloat16:
            flash = _forward_only(q.device)
        if flash is None and self.use_flash:
            flash = _installed_varlen()
        # FlashAttention counts the window back from the newest visible key, which is `lag` back.
        reach = -1 if window is None else window - segments.lags[0]
        if flash is None:
            return _TorchFlash.apply(q, *_visible(k, v, segments), segments, scale, reach)
        return _run(flash, q, k, v, segments, scale, reach)

    def block(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        segments.check(len(q))
        lagging = segments.all_lagging(BLOCK)
        if not lagging.keys.longest:
            return super().block(q, k, v, segments, scale)
        return _BlockFlash.apply(q, k, v, lagging, scale)


def _run(
    flash: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, reach: int
) -> Tensor:
    """A call of flash-attn; each query sees its newest visible key and the `reach` keys before it (-1: all)."""
    keys = segments.keys
    k, v = _visible(k, v, segments)
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


def _visible(k: Tensor, v: Tensor, segments: Segments) -> tuple[Tensor, Tensor]:
    """The keys and values that some query sees. With a lag, the last ones of each segment are dropped, so that the ends
    of queries and keys align."""
    rows = segments.keys.rows
    return (k, v) if rows is None else (k.index_select(0, rows), v.index_select(0, rows))


def installed_flash_attention() -> str | None:
    """The installed generation of flash-attn, which training runs on CUDA in half precision; None without one."""
    return next((name for name, module in FLASH_MODULES.items() if importlib.util.find_spec(module)), None)


@cache
def _installed_varlen() -> Callable[..., Any] | None:
    name = installed_flash_attention()
    return importlib.import_module(FLASH_MODULES[name]).flash_attn_varlen_func if name else None


@cache
def _forward_only(device: torch.device) -> Callable[..., Any] | None:
    if gpu_generation(device) != HOPPER or importlib.util.find_spec(FORWARD_MODULE) is None:
        return None
    try:
        return importlib.import_module(FORWARD_MODULE).flash_attn_varlen_func
    except (ImportError, OSError) as error:
        logger.warning("%s does not load with this torch: %s", FORWARD_MODULE, first_line(error))
        return None


def _forward(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, reach: int = -1
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """FlashAttention-2 as torch builds it, with segments and windows, which scaled_dot_product_attention does not pass.

    k, v: the visible keys; reach as in `_run`. Returns the output [N, H, D], the natural-log LSE, fp32 [H, N], +inf for
    a query that sees no key, and two tensors for `_backward`.
    """
    dropout, causal, return_debug_mask = 0.0, True, False
    inputs = (q, k, v, *_sizes(segments), dropout, causal, return_debug_mask)
    return torch.ops.aten._flash_attention_forward(*inputs, **_options(scale, reach))[:4]


def _backward(
    upstream: Tensor, saved: Sequence[Tensor], segments: Segments, scale: float, reach: int = -1
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of q, k and v, where the weight of a key is exp(score - lse) and `out` is the output of all keys.

    saved: q, k, v, out, lse and the two tensors from `_forward`.
    """
    dropout, causal = 0.0, True
    inputs = (upstream.contiguous(), *saved[:5], *_sizes(segments), dropout, causal, *saved[5:])
    return torch.ops.aten._flash_attention_backward(*inputs, **_options(scale, reach))


def _sizes(segments: Segments) -> tuple[Tensor, Tensor, int, int]:
    return segments.query_bounds, segments.keys.bounds, segments.longest, segments.keys.longest


def _options(scale: float, reach: int) -> dict[str, Any]:
    left, right = (None, None) if reach < 0 else (reach, 0)
    return {"scale": scale, "window_size_left": left, "window_size_right": right}


class _TorchFlash(torch.autograd.Function):
    """`_forward` with its gradient."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, reach: int) -> Tensor:
        out, lse, *state = _forward(q, k, v, segments, scale, reach)
        ctx.save_for_backward(q, k, v, out, lse, *state)
        ctx.call = segments, scale, reach
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        return *_backward(upstream, ctx.saved_tensors, *ctx.call), None, None, None


class _BlockFlash(torch.autograd.Function):
    """GLIDE's block pattern without a mask, as two parts that are merged by their log-sum-exp.

    Far keys, at a distance of BLOCK or more, are one causal call with a lag. Near keys are the visible ones at the
    distances 1 … BLOCK - 1, at most one per distance; plain torch operations add them.

    Keys and values are the frozen target's, so only the queries have a gradient. In backward the weight of a key is
    exp(score - lse) with the LSE of the whole, so each part computes its gradient from the `out` and `lse` of the
    whole, as the parts of ring attention do (arXiv 2310.01889):
        ds_ij = w_ij * (do_i . v_j - do_i . o_i) * scale,  dq_i = sum_j ds_ij * k_j
    """

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        far, far_lse, *state = _forward(q, *_visible(k, v, segments), segments, scale)

        # LSE per part, [BLOCK, N, H]. The first block of a segment sees no key: its LSE is +inf, so all weights are 0.
        sees_any = (segments.offsets >= BLOCK)[:, None]
        near = [scores for _, scores in _near_scores(q, k, segments.offsets, scale)]
        parts = torch.stack([far_lse.T.masked_fill(~sees_any, -torch.inf), *near])
        lse = parts.logsumexp(0).masked_fill(~sees_any, torch.inf)

        weights = (parts - lse).exp()[..., None]
        out = weights[0] * far
        # Key i - distance of query i is at row i after a roll; rows that wrap around have weight 0.
        for distance, weight in enumerate(weights[1:], start=1):
            out += _per_query_head(v.roll(distance, 0), q) * weight
        out = out.to(q.dtype)

        ctx.save_for_backward(q, k, v, out, lse.T.contiguous(), *state)
        ctx.segments, ctx.scale = segments, scale
        return out

    @staticmethod
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if any(ctx.needs_input_grad[1:3]):
            raise NotImplementedError(
                "block attention has no gradient of keys and values, which are the frozen target's"
            )
        q, k, v, out, lse, *state = ctx.saved_tensors
        segments, scale = ctx.segments, ctx.scale
        saved = (q, *_visible(k, v, segments), out, lse, *state)
        dq = _backward(upstream, saved, segments, scale)[0].to(lse.dtype)
        wide = upstream.to(lse.dtype)
        mean = (wide * out).sum(-1)  # do . o
        for distance, scores in _near_scores(q, k, segments.offsets, scale):
            weight = (scores - lse.T).exp()
            near_k = _per_query_head(k.roll(distance, 0), q)
            near_v = _per_query_head(v.roll(distance, 0), q)
            dq += (weight * ((wide * near_v).sum(-1) - mean) * scale)[..., None] * near_k
        return dq.to(q.dtype), None, None, None, None


def _near_scores(q: Tensor, k: Tensor, offsets: Tensor, scale: float) -> Iterator[tuple[int, Tensor]]:
    """Each distance 1 … BLOCK - 1 and the scores [N, H] of the keys at that distance, in fp32 or wider. The key at that
    distance is visible to the query at offset i if it is in an earlier block, i % BLOCK < distance, and the query is
    not in the first block. Other scores are -inf."""
    wide = q.to(torch.promote_types(q.dtype, torch.float32))
    for distance in range(1, BLOCK):
        scores = (wide * _per_query_head(k.roll(distance, 0), q)).sum(-1) * scale
        visible = (offsets % BLOCK < distance) & (offsets >= BLOCK)
        yield distance, scores.masked_fill(~visible[:, None], -torch.inf)


def _per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """[N, K, D] -> [N, H, D]: the KV head of each query head."""
    return x.repeat_interleave(q.shape[1] // x.shape[1], 1)
