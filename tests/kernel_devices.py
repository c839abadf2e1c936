"""Where tests of Triton kernels run (in the interpreter without a GPU, else on the GPU), their inputs and errors."""

import os

import pytest
import torch
from torch import Tensor

INTERPRETED = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs interpreter")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""Largest error of sums that are accumulated in fp32 and rounded once or twice."""


def random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)
