"""What the device at hand offers to the kernels."""

import importlib.util
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

OLDEST_GPU = 8
"""Compute capability (major) that the Triton kernels need: Ampere."""
SMALLEST_SHARED_MEMORY = 99 * 1024
"""Bytes that a program can have on every such GPU."""


class Gpu(NamedTuple):
    """What the launches depend on."""

    multiprocessors: int
    shared_memory: int
    """Bytes that a program can have."""
    overlaps: bool
    """Whether a kernel may start before the one in front of it has ended (programmatic dependent launch)."""


def describe_gpu(device: torch.device) -> Gpu:
    """The device's properties; for a CPU, where Triton interprets, those of a small GPU."""
    if device.type != "cuda":
        return Gpu(1, SMALLEST_SHARED_MEMORY, overlaps=False)
    import triton.language as tl

    properties = torch.cuda.get_device_properties(device)
    shared_memory = getattr(properties, "shared_memory_per_block_optin", SMALLEST_SHARED_MEMORY)  # torch 2.6 has none
    overlaps = properties.major >= 9 and hasattr(tl.extra.cuda, "gdc_wait")
    return Gpu(properties.multi_processor_count, shared_memory, overlaps)


def runs_triton(x: Tensor) -> bool:
    """Whether operations on x go through Triton kernels: where Triton runs, in any dtype but fp64."""
    return x.is_cuda and x.dtype != torch.float64 and _triton_runs_on(x.device)


@cache
def _triton_runs_on(device: torch.device) -> bool:
    installed = importlib.util.find_spec("triton") is not None
    return installed and torch.cuda.get_device_capability(device)[0] >= OLDEST_GPU


def upload(x: Tensor, device: torch.device) -> Tensor:
    """x on `device`; if it comes from the host, that does not wait for what runs there."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" and not x.is_cuda else x.to(device)
