"""Rounds and other passes as CUDA graphs: the host launches a whole round at once."""

import gc
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from threading import Lock
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from longspec.inference.engine.round_record import RoundResult
from longspec.inference.engine.rounds import Rounds

T = TypeVar("T")
CAPTURE_MODE = "thread_local"
"""torch's mode in which device calls of other threads do not end a capture."""

_one_at_a_time = Lock()
_warm_kinds: WeakKeyDictionary[nn.Module, set[Hashable]] = WeakKeyDictionary()
"""For each model the kinds of rounds (`Rounds.kind`) whose kernels are compiled."""


def compile_ahead(engines: Sequence[Rounds]) -> None:
    """Compile the kernels of rounds of one runner at once, which `warm_up` would compile one after the other."""
    new = [engine for engine in engines if engine.kind not in _warm_kinds.get(engine.runner.model, ())]
    if new:
        with new[0].runner.backend.compiling_only():
            for engine in new:
                engine.round(torch.zeros_like(engine.root, dtype=torch.bool))


def warm_up(engine: Rounds) -> None:
    """Run one round on the empty cache, unless an engine of this kind did, because capture needs compiled kernels."""
    warm_kinds = _warm_kinds.setdefault(engine.runner.model, set())
    if engine.kind not in warm_kinds:
        engine.round(torch.zeros_like(engine.root, dtype=torch.bool))
        warm_kinds.add(engine.kind)


class CapturedPass(Generic[T]):
    """A call as a CUDA graph on static tensors. The next run of any pass on a stream can overwrite its result."""

    def __init__(self, call: Callable[[], T], device: torch.device) -> None:
        """Record the call, whose kernels must be compiled, without running it and without waiting for the device."""
        self.call = call  # keeps the tensors that the graph works on
        self.graph = torch.cuda.CUDAGraph()
        pool = _pool_keeper(torch.cuda.current_stream()).pool()
        stream = _capture_stream(device)
        stream.wait_stream(torch.cuda.current_stream())

        with _one_at_a_time, torch.cuda.stream(stream), _no_garbage_collection():
            self.graph.capture_begin(pool, capture_error_mode=CAPTURE_MODE)
            try:
                self.result = call()
            except BaseException:
                with suppress(RuntimeError):  # ending a failed capture raises as well; the first error is the cause
                    self.graph.capture_end()
                raise
            self.graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def __call__(self) -> T:
        self.graph.replay()
        return self.result


def capture_pass(call: Callable[[], T], device: torch.device) -> CapturedPass[T]:
    """A `CapturedPass`. A second attempt follows if memory runs out: torch frees no cached blocks during a capture."""
    try:
        return CapturedPass(call, device)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return CapturedPass(call, device)


class CapturedRound:
    """`engine.round` as a CUDA graph."""

    def __init__(self, engine: Rounds) -> None:
        """Record the round without running it."""
        self.active = torch.ones_like(engine.root, dtype=torch.bool)
        self.replay = capture_pass(partial(engine.round, self.active), self.active.device)

    def __call__(self, active: Tensor) -> RoundResult:
        self.active.copy_(active)
        return self.replay()


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Pause garbage collection, because a finalizer that calls the device would end the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One stream for all captures of a device, because libraries keep a workspace per stream."""
    return torch.cuda.Stream(device)


@cache
def _pool_keeper(replay_stream: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """An empty graph that owns the memory pool of all passes replayed on one stream, one after another. Without it,
    every call of `generate` would leave the memory of its graph reserved."""
    graph = torch.cuda.CUDAGraph()
    stream = _capture_stream(replay_stream.device)
    with _one_at_a_time, torch.cuda.graph(graph, stream=stream, capture_error_mode=CAPTURE_MODE):
        torch.zeros(1, device=replay_stream.device)
    return graph
