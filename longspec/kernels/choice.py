"""The choice of a backend, once per runner, and of the kernels that read its prefix."""

import torch

from longspec.errors import UserError, warn_once
from longspec.extras import is_installed
from longspec.kernels import ATTENTIONS, DETERMINISTIC
from longspec.kernels.backend import Backend
from longspec.kernels.native.backend import NativeAttention, NativeBackend
from longspec.kernels.native.library import runs_native
from longspec.kernels.shared.device import HOPPER, OLDEST_GPU, gpu_generation, plain_gpu
from longspec.kernels.torch.attention import DecodingAttention

MODULES = {"flash": ("triton", "fa3_fwd_interface"), "triton": ("triton",), "native": (), "sdpa": ()}
"""Modules that each attention imports. The package fa3-fwd provides FlashAttention-3."""


def choose_backend(attention: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Backend:
    """The backend of a pair's device and dtype, with the requested attention: "flash" (FlashAttention-3), "triton",
    "native" (compiled for the CPU), "sdpa", or "auto" for the fastest that runs here. "deterministic" also makes the
    backend the one whose results do not depend on the number of rows.

    Logs once why a GPU runs on torch's own kernels alone, and with "auto" which missing package or other dtype would
    provide a faster attention. Raises UserError for an unknown name, and for one that cannot run here.
    """
    name = attention_name(attention, device, dtype, head_dim)
    if name == DETERMINISTIC:
        from longspec.kernels.triton.deterministic import DeterministicAttention, DeterministicBackend

        return DeterministicBackend(DeterministicAttention())
    kind: type[Backend] = NativeBackend if runs_native(device, dtype) else backend_of(device, dtype)
    return kind(_attention(name))


def backend_of(device: torch.device, dtype: torch.dtype) -> type[Backend]:
    """The backend of tensors on a device: Triton's on an NVIDIA GPU with Triton, in any dtype but fp64, else torch's.
    Its operations need no object but for attention."""
    if gpu_generation(device) < OLDEST_GPU or dtype == torch.float64 or not is_installed("triton"):
        return Backend
    from longspec.kernels.triton.backend import TritonBackend  # imports triton, which a machine without a GPU may lack

    return TritonBackend


def attention_name(requested: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str:
    """The name of the attention that `choose_backend` selects; the same messages and errors."""
    if requested == DETERMINISTIC:
        reason = _unsupported("triton", device, dtype, head_dim) or _missing_module("triton")
        if reason:
            raise UserError(f"{DETERMINISTIC}: cannot run here: {reason}; leave it out")
        return requested
    if requested not in ("auto", *ATTENTIONS):
        raise UserError(f"attention: unknown backend {requested!r}; choose one of auto, {', '.join(ATTENTIONS)}")
    plain = plain_gpu(device) if device.type == "cuda" else None
    if plain:
        warn_once("decoding runs on PyTorch's own kernels, without CUDA graphs: %s", plain)
    if requested != "auto":
        reason = _unsupported(requested, device, dtype, head_dim) or _missing_module(requested)
        if reason:
            raise UserError(f"attention: {requested!r} cannot run here: {reason}")
        return requested

    supported = [name for name in ATTENTIONS if _unsupported(name, device, dtype, head_dim) is None]
    name = next(name for name in supported if not _missing_module(name))
    for faster in supported[: supported.index(name)]:
        reason = _missing_module(faster)
        warn_once("decoding attention runs on %s; %s would be faster, but %s", name, faster, reason)
    if dtype == torch.float16 and not (
        _unsupported("flash", device, torch.bfloat16, head_dim) or _missing_module("flash")
    ):
        warn_once("decoding attention runs on %s: FlashAttention-3 takes bfloat16, not float16", name)
    return name


def _attention(name: str) -> DecodingAttention:
    if name == "native":
        return NativeAttention()
    if name == "sdpa":
        return DecodingAttention()
    # These modules import triton and fa3-fwd.
    if name == "flash":
        from longspec.kernels.triton.flash_attention import FlashAttention

        return FlashAttention()
    from longspec.kernels.triton.attention import TritonAttention

    return TritonAttention()


def _unsupported(name: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """Why the attention cannot run here with any package installed; None if it can."""
    if name == "sdpa":
        return None
    if name == "native":
        return None if runs_native(device, dtype) else "it needs a CPU, float32 and gcc"
    if device.type != "cuda":
        return f"it needs a CUDA device, not {device.type}"
    if plain := plain_gpu(device):
        return plain
    if dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"it does not take {dtype}"
    if name == "flash" and (dtype != torch.bfloat16 or head_dim > 256 or head_dim % 8):
        return f"it takes bfloat16 and a head_dim of 8, 16, … 256, not {dtype} and {head_dim}"
    if name == "flash" and gpu_generation(device) != HOPPER:
        return "it needs a Hopper GPU"
    return None


def _missing_module(name: str) -> str | None:
    missing = [module for module in MODULES[name] if not is_installed(module)]
    return f"{' and '.join(missing)} cannot be imported" if missing else None
