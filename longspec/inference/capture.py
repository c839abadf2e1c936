"""A round as one CUDA graph: the host launches it whole and looks at its result once."""

from __future__ import annotations

import gc
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from threading import Lock
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from longspec.inference.engine import Engine

MODE = "thread_local"
"""What other threads do to the device does not end a capture."""

_one_at_a_time = Lock()
_warm: WeakKeyDictionary[nn.Module, set[Hashable]] = WeakKeyDictionary()


def warm_up(engine: Engine) -> None:
    """One round on the empty cache, unless one of its kind has run: kernels are compiled before they are captured.

    It leaves the engine as it was, its random generator included.
    """
    kinds = _warm.setdefault(engine.runner.model, set())
    kind = engine.kind
    if kind in kinds:
        return
    generator = _generator(engine)
    state = generator.get_state()
    engine.round(torch.zeros_like(engine.root, dtype=torch.bool))
    generator.set_state(state)
    kinds.add(kind)


class CapturedRound:
    """`engine.round` with the same argument and results, which the next call overwrites."""

    def __init__(self, engine: Engine) -> None:
        """Records the round without running it; what is queued on the device meanwhile goes on."""
        self.active = torch.ones_like(engine.root, dtype=torch.bool)
        self.graph = torch.cuda.CUDAGraph()
        self.graph.register_generator_state(_generator(engine))
        pool = _pool_keeper(torch.cuda.current_stream()).pool()
        stream = _capture_stream(self.active.device)
        stream.wait_stream(torch.cuda.current_stream())
        with _one_at_a_time, torch.cuda.stream(stream), _no_garbage_collection():
            self.graph.capture_begin(pool, capture_error_mode=MODE)
            try:
                self.result = engine.round(self.active)
            except BaseException:
                with suppress(RuntimeError):  # the capture that failed cannot be ended well
                    self.graph.capture_end()
                raise
            self.graph.capture_end()
        torch.cuda.current_stream().wait_stream(stream)

    def __call__(self, active: Tensor) -> tuple[Tensor, Tensor]:
        self.active.copy_(active)
        self.graph.replay()
        return self.result


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """What a finaliser does to the device would end a capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@cache
def _capture_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all captures: libraries keep a workspace for every stream that they have seen."""
    return torch.cuda.Stream(device)


@cache
def _pool_keeper(replaying: torch.cuda.Stream) -> torch.cuda.CUDAGraph:
    """A graph of nothing much, whose memory the rounds that are replayed on one stream share.

    They follow one another there, and what one needs only while it runs the next may use. Without an owner that lasts,
    each `generate` would leave what its graph held reserved.
    """
    graph = torch.cuda.CUDAGraph()
    with _one_at_a_time, torch.cuda.graph(graph, stream=_capture_stream(replaying.device), capture_error_mode=MODE):
        torch.zeros(1, device=replaying.device)
    return graph


def capture_round(engine: Engine) -> CapturedRound:
    """`CapturedRound(engine)`, a second time if memory ran out: what is cached is given back outside a capture only."""
    try:
        return CapturedRound(engine)
    except torch.OutOfMemoryError:
        torch.cuda.empty_cache()
        return CapturedRound(engine)


def _generator(engine: Engine) -> torch.Generator:
    index = engine.root.device.index
    return engine.sampler.generator or torch.cuda.default_generators[index]
