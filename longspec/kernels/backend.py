"""What the device at hand offers to the kernels."""

import importlib.util
from functools import cache

import torch
from torch import Tensor


def runs_triton(x: Tensor) -> bool:
    """Whether operations on x go through Triton kernels: on CUDA, where Triton is installed, in any dtype but fp64."""
    return x.is_cuda and x.dtype != torch.float64 and _triton_installed()


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
