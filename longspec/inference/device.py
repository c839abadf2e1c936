"""The device and the dtype that a model is loaded with."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from longspec.errors import UserError
from longspec.models.pretrained import checked_dtype


def choose_device(device: str | torch.device | None) -> torch.device:
    """The CPU or a CUDA device; None is CUDA where there is one. Raises UserError for any other."""
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, TypeError) as error:
        raise UserError(f"device: {device!r} is no device; use cpu, cuda or cuda:N") from error
    if chosen.type not in ("cpu", "cuda"):
        raise UserError(f"device: {device!r} is not supported; use cpu, cuda or cuda:N")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device: {device}; this machine has {torch.cuda.device_count()} CUDA devices")
    return chosen


def choose_dtype(dtype: str | torch.dtype, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """The dtype by name; "auto" is the target's own on CUDA and float32 on a CPU. Raises UserError."""
    if isinstance(checked := checked_dtype(dtype), torch.dtype):
        return checked
    if device.type == "cpu":
        return torch.float32
    return config.dtype if isinstance(config.dtype, torch.dtype) else torch.float16
