"""Compilation of many kernels at once: a first round would compile one after the other."""

from __future__ import annotations

import gc
import os
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from threading import Lock
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from triton.runtime import driver
from triton.runtime.jit import JITFunction

try:
    from triton.runtime._async_compile import active_mode
except ImportError:  # Triton before 3.4
    active_mode = None

MOST_PROCESSES = 16
FEW_KERNELS = 4
"""Number of kernels up to which one process compiles them."""
PATIENCE_S = 30.0
"""Seconds after which processes that have not ended are killed, and this one compiles what they have not."""
NUMBER_BYTES = 2
"""Size of a kernel's number in the pipe from which processes take their work."""
_one_at_a_time = Lock()
_aten = torch.ops.aten
_EMPTY = {_aten.empty.memory_format, _aten.empty_strided.default, _aten.empty_like.default}
_EMPTY |= {_aten.new_empty.default, _aten.new_empty_strided.default}


class _Zeros(TorchDispatchMode):
    """New tensors are zero, because no kernel writes them, and other operations may use them as indices."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result.zero_() if func in _EMPTY else result


class _Compilations:
    """Takes the place of Triton's AsyncCompileMode, whose threads wait for each other: compilation holds Python's lock.

    Kernels are compiled by forked processes, which leave them in Triton's cache on disk, and then read from there.
    """

    def __init__(self) -> None:
        self.waiting: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {}

    def submit(self, key: str, compile_kernel: Callable[[], Any], finalize: Callable[[Any], None]) -> None:
        self.waiting.setdefault(key, (compile_kernel, finalize))

    def finish(self) -> None:
        """Compile everything."""
        calls = [partial(_compile_with_launcher, compile_kernel) for compile_kernel, _ in self.waiting.values()]
        if len(calls) > FEW_KERNELS:
            _run_in_forks(calls, min(MOST_PROCESSES, len(os.sched_getaffinity(0)), len(calls)))
        for compile_kernel, finalize in self.waiting.values():
            finalize(compile_kernel())


def _compile_with_launcher(compile_kernel: Callable[[], Any]) -> None:
    """Compile a kernel and its launcher, which is C code up to Triton 3.6 and else compiled by the first launch."""
    kernel = compile_kernel()
    driver.active.launcher_cls(kernel.src, kernel.metadata)


def _run_in_forks(calls: Sequence[Callable[[], Any]], count: int) -> None:
    """Run calls in this many processes. They only warm a cache, so it does not matter whether they fail."""
    running: set[int] = set()
    with warnings.catch_warnings(), suppress(OSError):
        warnings.simplefilter("ignore", DeprecationWarning)  # other threads exist; the forks use none of their locks
        numbers, end_of_numbers = os.pipe()  # a process that is free takes the next number
        os.write(end_of_numbers, b"".join(number.to_bytes(NUMBER_BYTES) for number in range(len(calls))))
        os.close(end_of_numbers)
        for _ in range(count):
            process = os.fork()
            if process == 0:
                _run_and_exit(calls, numbers)
            running.add(process)
        os.close(numbers)
    end = time.monotonic() + PATIENCE_S
    while running:
        if time.monotonic() > end:
            for process in running:
                os.kill(process, signal.SIGKILL)
        running = {process for process in running if not _has_ended(process)}
        time.sleep(0.01)


def _has_ended(process: int) -> bool:
    try:
        return os.waitpid(process, os.WNOHANG)[0] != 0
    except ChildProcessError:  # a program that ignores SIGCHLD has no children to wait for
        return True


def _run_and_exit(calls: Sequence[Callable[[], Any]], numbers: int) -> None:
    """In a fork: the device's context is the parent's, so nothing may free a tensor."""
    gc.disable()
    try:
        while number := os.read(numbers, NUMBER_BYTES):
            with suppress(Exception):
                calls[int.from_bytes(number)]()
    finally:
        os._exit(0)


@contextmanager
def compiling_only() -> Iterator[None]:
    """While this is open, launches of kernels by this thread note what must be compiled, and no kernel runs.

    All are compiled when it ends. Other operations run, on tensors that no kernel has written. Without effect in
    versions of Triton that cannot do this.
    """
    if active_mode is None:
        yield
        return
    compilations = _Compilations()

    def run(self: Any, *args: Any, warmup: bool, **kwargs: Any) -> Any:
        # Other threads go on launching.
        return launch(self, *args, warmup=warmup or active_mode.get() is compilations, **kwargs)

    with _one_at_a_time:
        launch = JITFunction.run
        token = active_mode.set(compilations)
        JITFunction.run = run
        try:
            with _Zeros():
                yield
        finally:
            JITFunction.run = launch
            active_mode.reset(token)
    compilations.finish()
