"""Properties of the device on which the launches of the kernels depend."""

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

OLDEST_GPU = 8
"""Smallest major compute capability for the Triton kernels and bf16 (Ampere)."""
HOPPER = 9
"""Major compute capability of the GPUs that FlashAttention-3 is built for."""
SMALLEST_SHARED_MEMORY = 99 * 1024
"""Bytes of shared memory that a program can use on any such GPU."""


class Gpu(NamedTuple):
    """Properties of a GPU."""

    multiprocessors: int
    shared_memory: int
    """Bytes of shared memory that a program can use."""
    overlaps: bool
    """Whether a kernel may start before the previous one has ended (programmatic dependent launch)."""


@cache
def describe_gpu(device: torch.device) -> Gpu:
    """Properties of the device; for a CPU, where kernels run in Triton's interpreter, those of a small GPU."""
    if device.type != "cuda":
        return Gpu(1, SMALLEST_SHARED_MEMORY, overlaps=False)
    import triton.language as tl

    properties = torch.cuda.get_device_properties(device)
    # torch 2.6 does not report the shared memory.
    shared_memory = getattr(properties, "shared_memory_per_block_optin", SMALLEST_SHARED_MEMORY)
    overlaps = gpu_generation(device) >= HOPPER and hasattr(tl.extra.cuda, "gdc_wait")
    return Gpu(properties.multi_processor_count, shared_memory, overlaps)


def gpu_generation(device: torch.device) -> int:
    """Major compute capability of an NVIDIA GPU; 0 for every other device. torch reports AMD GPUs as CUDA devices with
    capabilities on another scale: an MI300 has 9.4."""
    if device.type != "cuda" or torch.version.hip is not None:
        return 0
    return torch.cuda.get_device_capability(device)[0]


def plain_gpu(device: torch.device) -> str | None:
    """Why a CUDA device runs on PyTorch's own kernels only; None for one that runs ours."""
    if torch.version.hip is not None:
        return "the kernels for NVIDIA GPUs do not run on ROCm"
    if gpu_generation(device) < OLDEST_GPU:
        major, minor = torch.cuda.get_device_capability(device)
        return f"this GPU has compute capability {major}.{minor}, the kernels need {OLDEST_GPU}.0 (Ampere)"
    return None


def upload(x: Tensor, device: torch.device) -> Tensor:
    """A copy of x on `device`. The host does not wait for the device to finish earlier work."""
    if device.type == "cuda" and not x.is_cuda:
        return x.pin_memory().to(device, non_blocking=True)
    return x.to(device)


class Download:
    """A copy of x on its way to the host. Work that is launched later may overwrite x."""

    def __init__(self, x: Tensor) -> None:
        self._copy = x.to("cpu", non_blocking=True, copy=True)
        self._arrival = torch.cuda.Event() if x.is_cuda else None
        if self._arrival is not None:
            self._arrival.record()

    def numpy(self) -> np.ndarray:
        """The values of x. Waits for the work before the copy, and for no other."""
        if self._arrival is not None:
            self._arrival.synchronize()
        return self._copy.numpy()
