"""What the device at hand offers to the kernels."""

import importlib.util
from functools import cache

import torch
from torch import Tensor


def runs_triton(tensor: Tensor) -> bool:
    """True on a CUDA device where Triton is installed."""
    return tensor.is_cuda and _triton_installed()


@cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that one program may take; on a CPU (Triton's interpreter) as much as on a small GPU."""
    if device.type != "cuda":
        return 96 << 10
    from triton.runtime import driver

    return driver.active.utils.get_device_properties(device.index or 0)["max_shared_mem"]


def overlap(tensor: Tensor) -> dict[str, bool]:
    """Launch options of a kernel that waits for the one before it itself: on Hopper and later it is set up while that
    one drains (programmatic dependent launch)."""
    if not _overlaps(tensor.device):
        return {"OVERLAP": False}
    return {"OVERLAP": True, "launch_pdl": True}


@cache
def _overlaps(device: torch.device) -> bool:
    if device.type != "cuda" or torch.cuda.get_device_capability(device)[0] < 9:
        return False
    return importlib.util.find_spec("triton.language.extra.cuda.gdc") is not None
