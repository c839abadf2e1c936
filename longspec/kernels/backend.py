"""Whether a tensor's operations run through Triton."""

import importlib.util
from functools import cache

from torch import Tensor


def runs_triton(tensor: Tensor) -> bool:
    """True on a CUDA device where Triton is installed."""
    return tensor.is_cuda and _triton_installed()


@cache
def _triton_installed() -> bool:
    return importlib.util.find_spec("triton") is not None
