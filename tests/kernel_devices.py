"""Where tests of Triton kernels run: in Triton's interpreter without a GPU, else on the GPU."""

import os

import pytest

INTERPRETED = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs interpreter")
DEVICES = [pytest.param("cpu", marks=INTERPRETED), pytest.param("cuda", marks=pytest.mark.gpu)]
