"""The device and dtype of a model, and the facts about the machine that are stored with results."""

import importlib.metadata
import platform

import psutil
import torch
from transformers import PreTrainedConfig

from longspec.errors import UserError, warn_once
from longspec.kernels.shared.device import OLDEST_GPU
from longspec.models.target_files import checked_dtype
from longspec.version import __version__


def choose_device(device: str | torch.device | None) -> torch.device:
    """The CPU or a CUDA device; None is CUDA if there is one. Raises UserError for any other device."""
    try:
        chosen = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    except (RuntimeError, TypeError):
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        raise UserError(f"device: {device!r} is not supported; use cpu, cuda or cuda:N")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise UserError(f"device: {device}; this machine has {torch.cuda.device_count()} CUDA devices")
    return chosen


def choose_dtype(dtype: str | torch.dtype, config: PreTrainedConfig, device: torch.device) -> torch.dtype:
    """The dtype by name; "auto" is the target's own on CUDA and float32 on a CPU. Raises UserError. "auto" on a GPU
    without bfloat16 is float16 for a target in bfloat16, and logs it."""
    checked = checked_dtype(dtype)
    if isinstance(checked, torch.dtype):
        return checked
    if device.type == "cpu":
        return torch.float32
    own = config.dtype if isinstance(config.dtype, torch.dtype) else torch.float16
    if own == torch.bfloat16 and torch.version.hip is None and torch.cuda.get_device_capability(device)[0] < OLDEST_GPU:
        warn_once("dtype auto: float16 instead of the target's bfloat16, which this GPU does not compute in")
        return torch.float16
    return own


def device_name(device: torch.device) -> str:
    """The name of the GPU, or the architecture of the CPU."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"cpu ({platform.machine()})"


def versions() -> dict[str, str | None]:
    """Versions of the packages that measurements depend on; None for a package that is not installed."""
    by_name: dict[str, str | None] = {"python": platform.python_version(), "longspec": __version__}
    for package in ("torch", "transformers", "triton"):
        try:
            by_name[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            by_name[package] = None
    return by_name


def free_bytes(device: torch.device) -> int:
    """Free memory of a CUDA device, or of the host for a CPU."""
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else psutil.virtual_memory().available
