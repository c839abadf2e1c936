"""The entry point of training attention over packed segments; differentiable.

Shape letters are those of CONTRIBUTING.md; here N counts the flattened tokens of a micro-batch. Half precision on CUDA
runs on FlashAttention, everything else on torch's own attention over padded segments. Neither needs a mask of
tokens x tokens.
"""

import logging
from functools import cache

import torch
from torch import Tensor

from longspec.errors import UserError
from longspec.kernels.training import varlen_flash, varlen_padded
from longspec.kernels.training.segments import BLOCK, Segments

logger = logging.getLogger(__name__)


def varlen_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    segments: Segments,
    scale: float,
    window: int | None = None,
    use_flash: bool = True,
) -> Tensor:
    """Causal attention within each segment, optionally with a window and a lag per segment.

    q [N, H, D]; k, v [N, K, D]. The query at offset i of a segment sees the keys at offsets i - window … i - lag.
    (Flash noisy training is a lag without a window.) use_flash: whether to run flash-attn where it is installed.
    Returns [N, H, D]; a query that sees no key gets 0. Raises ValueError unless the segments cover N tokens.
    """
    segments.check(len(q))
    if varlen_flash.takes(q, segments, window):
        return varlen_flash.attention(q, k, v, segments, scale, window, use_flash)
    return varlen_padded.attention(q, k, v, segments, scale, window)


def block_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, block: int = BLOCK) -> Tensor:
    """GLIDE's block cross-attention: query i of a segment sees the keys j with j // block < i // block.

    Shapes and errors as in `varlen_attention`; lags are ignored. The first block of a segment sees no key and gets 0.
    """
    segments.check(len(q))
    # Every key at a distance of `block` or more is visible, so both paths start from segments that lag by `block`.
    lagging = segments.lagging([block] * len(segments.lengths))
    if varlen_flash.takes(q, lagging, None):
        return varlen_flash.block_attention(q, k, v, lagging, scale, block)
    return varlen_padded.block_attention(q, k, v, lagging, scale, block)


def resolve_attention(requested: str | None) -> str:
    """The attention that training runs for a config's `attn_implementation`; logs once if it differs.

    None means "sdpa". Returns "flash_attention_2", "flash_attention_3", "sdpa" or "eager". Raises UserError for any
    other name.
    """
    name = requested or "sdpa"
    known = (*varlen_flash.FLASH_MODULES, "sdpa", "eager")
    if name not in known:
        raise UserError(f"attn_implementation: unknown value {requested!r}; choose one of {', '.join(known)}")
    if name not in varlen_flash.FLASH_MODULES:
        return name
    # The compute capability is not read here, because that initializes CUDA. `varlen_flash` logs a GPU that is too old.
    on_gpu = torch.cuda.is_available() and torch.version.hip is None
    used = (on_gpu and varlen_flash.installed_flash_attention()) or "sdpa"
    if used != name:
        _log_replacement(name, "PyTorch's own attention" if used == "sdpa" else used)
    return used


@cache
def _log_replacement(requested: str, used: str) -> None:
    logger.warning("attn_implementation: %s cannot be used here; training runs on %s", requested, used)
