"""The entry point of decoding attention: selects the backend that the engine and the draft keep for a run."""

import importlib.util
import logging
from functools import cache

import torch

from longspec.errors import UserError
from longspec.kernels import BACKENDS
from longspec.kernels.decoding.attention_interface import DecodingAttention
from longspec.kernels.decoding.native_attention import NativeAttention
from longspec.kernels.decoding.sdpa_attention import SdpaAttention
from longspec.kernels.native.library import runs_native
from longspec.kernels.shared.device import HOPPER, describe_gpu, gpu_generation, plain_gpu

logger = logging.getLogger(__name__)

MODULES = {"flash": ("triton", "fa3_fwd_interface"), "triton": ("triton",), "native": (), "sdpa": ()}
"""Modules that each backend imports. The package fa3-fwd provides FlashAttention-3."""


def decoding_attention(requested: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> DecodingAttention:
    """The requested backend: "flash" (FlashAttention-3), "triton", "native" (compiled for the CPU), "sdpa", or
    "auto" for the fastest that runs here.

    Logs once why a GPU runs on "sdpa" alone, and with "auto" which missing package or other dtype would provide a
    faster backend. Raises UserError for an unknown name and for a backend requested by name that cannot run here.
    """
    if requested not in ("auto", *BACKENDS):
        raise UserError(f"attention: unknown backend {requested!r}; choose one of auto, {', '.join(BACKENDS)}")

    if requested == "auto":
        supported = [name for name in BACKENDS if _unsupported(name, device, dtype, head_dim) is None]
        name = next(name for name in supported if not _missing_module(name))
        faster = supported[: supported.index(name)]
        _log_missing(tuple(faster), name)
        if dtype == torch.float16 and _unsupported("flash", device, torch.bfloat16, head_dim) is None:
            _log_half_precision(name)
    else:
        name = requested
        reason = _unsupported(name, device, dtype, head_dim) or _missing_module(name)
        if reason:
            raise UserError(f"attention: {name!r} cannot run here: {reason}")

    plain = plain_gpu(device) if device.type == "cuda" else None
    if plain:
        _log_plain_gpu(plain)

    # These modules import triton and fa3-fwd, which a machine without a GPU may lack.
    if name == "flash":
        from longspec.kernels.decoding.flash_attention import FlashAttention

        return FlashAttention(describe_gpu(device))
    if name == "triton":
        from longspec.kernels.decoding.triton_attention import TritonAttention

        return TritonAttention(describe_gpu(device))
    if name == "native":
        return NativeAttention()
    return SdpaAttention()


def _unsupported(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the backend cannot run here with any package installed; None if it can."""
    if name == "sdpa":
        return None
    if name == "native":
        return None if runs_native(device, dtype) else "it needs a CPU, float32 and gcc"
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    plain = plain_gpu(device)
    if plain:
        return plain
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it does not take {dtype}"
    if name == "flash" and (dtype != torch.bfloat16 or head_dim > 256 or head_dim % 8):
        return f"it takes bfloat16 and a head_dim of 8, 16, … 256, not {dtype} and {head_dim}"
    if name == "flash" and gpu_generation(device) != HOPPER:
        return "it needs a Hopper GPU"
    return None


def _missing_module(name: str) -> str | None:
    missing = [module for module in MODULES[name] if not _installed(module)]
    return f"{' and '.join(missing)} cannot be imported" if missing else None


@cache
def _log_missing(faster: tuple[str, ...], used: str) -> None:
    for name in faster:
        logger.warning("decoding attention runs on %s; %s would be faster, but %s", used, name, _missing_module(name))


@cache
def _log_half_precision(used: str) -> None:
    if _missing_module("flash") is None:
        logger.warning("decoding attention runs on %s: FlashAttention-3 takes bfloat16, not float16", used)


@cache
def _log_plain_gpu(reason: str) -> None:
    logger.warning("decoding runs on PyTorch's own kernels, without CUDA graphs: %s", reason)


@cache
def _installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None
