"""Training attention over packed segments: FlashAttention in half precision on CUDA, else torch segment by segment.

FlashAttention is flash-attn if it is installed, else FlashAttention-2 as torch builds it. A lag needs no mask: the
causal mask aligns the ends of T queries and T - lag keys, so query i sees the keys up to i - lag. Blocks and EAGLE-3's
steps also see nearer keys, which a Triton kernel adds. On Hopper the target's pass, which has no backward, runs on the
forward of FlashAttention-3 (package fa3-fwd). Shape letters are those of CONTRIBUTING.md; N counts flattened tokens, M
segments.
"""

import importlib
import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor

from longspec.errors import UserError, first_line, warn_once
from longspec.extras import is_installed
from longspec.kernels.shared.device import HOPPER, gpu_generation, plain_gpu
from longspec.kernels.training.segments import BLOCK, Segments
from longspec.kernels.training.torch_flash import TorchFlash, visible
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
            return TorchFlash.apply(q, *visible(k, v, segments), segments, scale, reach)
        return _run(flash, q, k, v, segments, scale, reach)

    def block(self, q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
        segments.check(len(q))
        lagging, offsets = segments.all_lagging(BLOCK), segments.offsets
        if not _can_merge() or not lagging.keys.longest:
            return super().block(q, k, v, segments, scale)
        from longspec.kernels.triton.near_keys import Near, merged

        # Far keys are at a distance of BLOCK or more. The key at a shorter distance is visible if it is in an earlier
        # block.
        distances = torch.arange(1, BLOCK, device=q.device)[:, None]
        near = Near([k] * (BLOCK - 1), [v] * (BLOCK - 1), 1, (offsets % BLOCK < distances) & (offsets >= BLOCK))
        return merged(q, k, v, near, lagging, scale)

    def steps(
        self, q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], segments: Segments, scale: float, window: int
    ) -> Tensor:
        segments.check(len(q))
        back, offsets = len(keys) - 1, segments.offsets
        # Row i of the far keys is that of token i + 1, which drops the first token of each segment.
        lagging = segments.all_lagging(back + 1)
        # A draft's heads may have another size than the target's.
        fits = q.shape[2] <= MAX_HEAD_DIM and q.shape[2] % 8 == 0
        if not _can_merge() or not fits or not lagging.keys.longest or window < back:
            return super().steps(q, keys, values, segments, scale, window)
        from longspec.kernels.triton.near_keys import Near, merged

        if back:  # the key of the newest step is at distance 0, that of step 2 at back - 1
            distances = torch.arange(back, device=q.device)[:, None]
            near = Near(keys[:0:-1], values[:0:-1], 0, offsets >= distances)
        else:
            near = Near(keys, values, 0, (offsets == 0)[None])
        reach = -1 if window >= segments.longest else window - back
        return merged(q, keys[0].roll(-1, 0), values[0].roll(-1, 0), near, lagging, scale, reach)


def _can_merge() -> bool:
    """Whether Triton is installed, whose kernel merges attention to far and near keys. If not, logs it once."""
    if not is_installed("triton"):
        warn_once("attention of blocks and of EAGLE-3's steps runs segment by segment: triton is not installed")
    return is_installed("triton")


def _run(
    flash: Callable[..., Any], q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, reach: int
) -> Tensor:
    """A call of flash-attn; each query sees its newest visible key and the `reach` keys before it (-1: all)."""
    keys = segments.keys
    k, v = visible(k, v, segments)
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
    """The installed generation of flash-attn, which training runs on CUDA in half precision; None without one."""
    return next((name for name, module in FLASH_MODULES.items() if is_installed(module)), None)


@cache
def _installed_varlen() -> Callable[..., Any] | None:
    name = installed_flash_attention()
    return importlib.import_module(FLASH_MODULES[name]).flash_attn_varlen_func if name else None


@cache
def _forward_only(device: torch.device) -> Callable[..., Any] | None:
    if gpu_generation(device) != HOPPER or not is_installed(FORWARD_MODULE):
        return None
    try:
        return importlib.import_module(FORWARD_MODULE).flash_attn_varlen_func
    except (ImportError, OSError) as error:
        logger.warning("%s does not load with this torch: %s", FORWARD_MODULE, first_line(error))
        return None
