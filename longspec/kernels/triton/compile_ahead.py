"""Compilation of many kernels at once: a first round would compile one after the other."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime.jit import JITFunction

try:
    from triton.runtime._async_compile import AsyncCompileMode, active_mode
except ImportError:  # Triton before 3.4
    AsyncCompileMode = active_mode = None

MOST_THREADS = 16
_aten = torch.ops.aten
_EMPTY = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default}
_EMPTY |= {_aten.new_empty.default, _aten.new_empty_strided.default}


class _Zeros(TorchDispatchMode):
    """New tensors are zero, because no kernel writes them, and other operations may use them as indices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in _EMPTY else result


@contextmanager
def compiling_only() -> Iterator[None]:
    """While this is open, launches of kernels by this thread compile them in other threads, and no kernel runs.

    All are compiled when it ends. Other operations run, on tensors that no kernel has written. Without effect on new
    tensors and kernels in versions of Triton that cannot do this.
    """
    if AsyncCompileMode is None:
        yield
        return
    launch = JITFunction.run

    def run(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        # Other threads go on launching.
        return launch(self, *args, warmup=warmup or active_mode.get() is not None, **kwargs)

    JITFunction.run = run
    try:
        threads = min(MOST_THREADS, len(os.sched_getaffinity(0)))
        with ThreadPoolExecutor(threads) as pool, AsyncCompileMode(pool), _Zeros():
            yield
    finally:
        JITFunction.run = launch
