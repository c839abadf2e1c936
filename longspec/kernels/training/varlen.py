"""The choice of training's attention over packed segments.

Half precision on CUDA runs on FlashAttention, everything else on torch's own attention over padded segments. Neither
needs a mask of tokens x tokens.
"""

import torch

from longspec.errors import UserError, warn_once
from longspec.kernels.training import varlen_flash
from longspec.kernels.training.varlen_flash import FlashAttention
from longspec.kernels.training.varlen_padded import PaddedAttention


def training_attention(device: torch.device, dtype: torch.dtype, head_dim: int, use_flash: bool) -> PaddedAttention:
    """The fastest attention for a pair. use_flash: whether to run flash-attn where it is installed."""
    return FlashAttention(use_flash) if varlen_flash.runs(device, dtype, head_dim) else PaddedAttention()


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
        own = "PyTorch's own attention" if used == "sdpa" else used
        warn_once("attn_implementation: %s cannot be used here; training runs on %s", name, own)
    return used
