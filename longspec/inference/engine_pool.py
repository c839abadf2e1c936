"""Engines that are kept between calls of `generate`: caches, draft state, rotary tables and captured rounds.

A call borrows an engine of its kind, or builds one. Idle engines own no weights, and go with the model that they were
built for.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock
from typing import TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor

from longspec.inference.device import free_bytes
from longspec.inference.drafting.reduced_head import head_bytes
from longspec.inference.engine.engine import Engine
from longspec.inference.engine.kernel_key import CAPACITY_STEP, MOST_SIZE_CLASSES, KernelKey
from longspec.inference.memory import row_bytes
from longspec.inference.request import Sampling
from longspec.inference.round_source import RoundSource
from longspec.inference.runner import Runner
from longspec.models.glide import GlideMixin
from longspec.models.parallel import least_over_ranks, model_parallel_rank_and_size

MOST_IDLE = 4
"""Largest number of idle engines per model."""
IDLE_SHARE = 0.25
"""Largest share of the device's free memory, theirs included, that the idle engines of a model may hold."""
STEPS_PER_OCTAVE = 8
"""Number of cache sizes between a power of two and the next one."""

T = TypeVar("T")

_lock = Lock()
_idle: WeakKeyDictionary[GlideMixin, list[PooledEngine]] = WeakKeyDictionary()
"""The idle engines of each model, the one used last at the end."""


@dataclass
class PooledEngine:
    """An engine with its rounds."""

    kind: Hashable
    room: int
    """Positions per row for a prompt and its new tokens."""
    source: RoundSource
    bytes: int
    """Estimated size of its caches, of its draft's head and of a round's logits."""
    reusable: bool = True
    """Whether its caches are finite."""

    @property
    def engine(self) -> Engine:
        return self.source.engine

    def restart(self, prompts: Tensor, lengths: Sequence[int], sampling: Sampling, seeds: Sequence[int]) -> None:
        """Prepare for other prompts [B, P], padded on the right, and for other settings of the same kind."""
        engine = self.engine
        engine.prompts, engine.prompt_lengths = prompts, list(lengths)
        if engine.sampler.has_settings:
            engine.sampler.settings.assign(slice(0, len(lengths)), [sampling] * len(lengths), seeds)


def engine_kind(kernels: KernelKey, runner: Runner) -> Hashable:
    """The kernels of an engine's rounds, and what their captures hold: the weights, and the memory of a stream."""
    device = runner.device
    tensors = (*runner.model.parameters(), *runner.model.buffers())
    weights = tuple((tensor.data_ptr(), tensor.numel()) for tensor in tensors)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    return kernels, weights, stream


def rounded_room(positions: int, max_positions: int) -> int:
    """`positions` rounded up to one of few sizes, at most to `max_positions`.

    Up to MOST_SIZE_CLASSES steps the size of the cache decides which kernels run, so an engine only serves calls of
    its own size. Beyond that an engine serves all smaller calls.
    """
    step = CAPACITY_STEP
    if positions <= CAPACITY_STEP * MOST_SIZE_CLASSES:
        step = max(step, (1 << (positions - 1).bit_length()) // (2 * STEPS_PER_OCTAVE))
    return max(positions, min(-(-positions // step) * step, max_positions))


@contextmanager
def borrowed(
    kind: Hashable, room: int, runner: Runner, build: Callable[[], RoundSource], listed: int | None
) -> Iterator[PooledEngine]:
    """An engine of this kind with room for `room` positions per row: an idle one, or a new one from `build`.

    It becomes idle at the end, unless an exception ends the call, because the state of its caches is unknown then.
    Another thread gets another engine. An idle engine without enough room is replaced. runner: a runner of this call,
    whose weights an idle engine takes over. listed: length of the vocabulary list of the engine's draft; None without
    one.
    """
    model = runner.model
    pooled = _take(model, kind)
    if pooled is not None and pooled.room >= room:
        pooled.engine.runner.take_weights(runner)
    else:
        del pooled  # its memory is free for the new engine
        source = with_released_memory(model, build)
        pooled = PooledEngine(kind, room, source, _size(source.engine, room, listed))
    yield pooled
    if pooled.reusable:
        pooled.engine.runner.drop_weights()
        _give_back(model, pooled)


def with_released_memory(model: GlideMixin, call: Callable[[], T]) -> T:
    """`call()`; if memory runs out, the idle engines of the model are freed for a second attempt.

    There is none if several ranks share the target, because the others do not repeat the call.
    """
    try:
        return call()
    except torch.OutOfMemoryError:
        if model_parallel_rank_and_size()[1] > 1 or not release(model):
            raise
    return call()


def release(model: GlideMixin) -> int:
    """Free the memory of a model's idle engines. Returns their number."""
    with _lock:
        engines = _idle.pop(model, [])
    count = len(engines)
    engines.clear()
    if count and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return count


def release_all() -> None:
    """Free the idle engines of all models."""
    with _lock:
        models = list(_idle)
    for model in models:
        release(model)


def _take(model: GlideMixin, kind: Hashable) -> PooledEngine | None:
    """Remove the idle engine of a kind that was used last."""
    with _lock:
        engines = _idle.get(model, [])
        for number in reversed(range(len(engines))):
            if engines[number].kind == kind:
                return engines.pop(number)
    return None


def _give_back(model: GlideMixin, pooled: PooledEngine) -> None:
    """Add an idle engine, and free those that were unused for the longest time if there are too many or too large."""
    with _lock:
        engines = _idle.setdefault(model, [])
        engines.append(pooled)
        held = sum(engine.bytes for engine in engines)
        # Ranks that share a target keep the same engines, because building one runs collectives.
        free = least_over_ranks(free_bytes(pooled.engine.root.device), pooled.engine.root.device)
        limit = IDLE_SHARE * (free + held)
        while engines and (len(engines) > MOST_IDLE or held > limit):
            held -= engines.pop(0).bytes


def _size(engine: Engine, room: int, listed: int | None) -> int:
    """Bytes of an engine's cache, of its draft's head and of the logits of a round."""
    config, dtype, rows = engine.runner.config, engine.runner.dtype, len(engine.root)
    row = row_bytes(config, dtype, room + engine.drafter.depth, engine.drafter.nodes)
    return rows * row + head_bytes(config, dtype, listed, rows)
