"""Batches that are kept between calls, with captured rounds. Idle ones own no weights, and go with their model."""

from collections.abc import Callable, Hashable
from threading import Lock
from typing import TYPE_CHECKING, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

import torch

from longspec.inference.device import free_bytes
from longspec.inference.engine.rounds import CAPACITY_STEP, MOST_SIZE_CLASSES, KernelKey
from longspec.inference.runner import Runner
from longspec.models.glide import GlideMixin
from longspec.models.parallel import least_over_ranks, model_parallel_rank_and_size

if TYPE_CHECKING:
    from longspec.inference.engine.batch import Batch

MOST_IDLE = 4
"""Largest number of idle batches per model."""
IDLE_SHARE = 0.25
"""Largest share of the device's free memory, theirs included, that the idle batches of a model may hold."""
STEPS_PER_OCTAVE = 8
"""Number of cache sizes between a power of two and the next one."""

T = TypeVar("T")

_lock = Lock()
_idle: "WeakKeyDictionary[GlideMixin, list[Batch]]" = WeakKeyDictionary()
"""The idle batches of each model, the one used last at the end."""


class Pooled(NamedTuple):
    """The key and the size of a pooled batch."""

    kind: Hashable
    room: int
    """Positions per row for a prompt and its new tokens."""
    bytes: int
    """Estimated size of its caches, of its draft's head and of a round's logits."""
    is_whole: bool
    """Whether its rounds run over all rows."""


NOT_POOLED = Pooled(None, 0, 0, False)
"""Of a batch that later calls do not reuse."""


def batch_kind(kernels: KernelKey, runner: Runner) -> Hashable:
    """The kernels of a batch's rounds, and what their captures hold: the weights, and the memory of a stream."""
    device = runner.device
    tensors = (*runner.model.parameters(), *runner.model.buffers())
    weights = tuple((tensor.data_ptr(), tensor.numel()) for tensor in tensors)
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else None
    return kernels, weights, stream


def rounded_room(positions: int, max_positions: int) -> int:
    """`positions` rounded up to one of few sizes, at most to `max_positions`: up to MOST_SIZE_CLASSES steps the size of
    the cache decides which kernels run, so a batch only serves calls of its own size."""
    step = CAPACITY_STEP
    if positions <= CAPACITY_STEP * MOST_SIZE_CLASSES:
        step = max(step, (1 << (positions - 1).bit_length()) // (2 * STEPS_PER_OCTAVE))
    return max(positions, min(-(-positions // step) * step, max_positions))


def borrow(kind: Hashable, room: int, runner: Runner) -> "Batch | None":
    """An idle batch of this kind with room for `room` positions per row, until `give_back`; None if there is none. One
    without enough room is freed. runner: a runner of this call, whose weights the batch takes over."""
    with _lock:
        batches = _idle.get(runner.model, [])
        batch = next((batch for batch in reversed(batches) if batch.pooled.kind == kind), None)
        if batch is None:
            return None
        batches.remove(batch)
    if batch.pooled.room < room:
        return None
    batch.runner.take_weights(runner)
    return batch


def give_back(batch: "Batch") -> None:
    """Make a batch idle, whose requests have all ended and whose caches are finite. If there are too many or too large
    ones, those that were unused for the longest time are freed."""
    model, device = batch.runner.model, batch.device
    batch.runner.drop_weights()
    with _lock:
        batches = _idle.setdefault(model, [])
        batches.append(batch)
        held = sum(other.pooled.bytes for other in batches)
        # Ranks that share a target keep the same batches, because building one runs collectives.
        limit = IDLE_SHARE * (least_over_ranks(free_bytes(device), device) + held)
        while batches and (len(batches) > MOST_IDLE or held > limit):
            held -= batches.pop(0).pooled.bytes


def with_released_memory(model: GlideMixin, call: Callable[[], T]) -> T:
    """`call()`; if memory runs out, idle batches are freed for a second attempt, which other ranks could not repeat."""
    try:
        return call()
    except torch.OutOfMemoryError:
        if model_parallel_rank_and_size()[1] > 1 or not release(model):
            raise
    return call()


def release(model: GlideMixin) -> int:
    """Free the memory of a model's idle batches. Returns their number."""
    with _lock:
        batches = _idle.pop(model, [])
    count = len(batches)
    batches.clear()
    if count and torch.cuda.is_available():
        torch.cuda.empty_cache()
    return count


def release_all() -> None:
    """Free the idle batches of all models."""
    with _lock:  # other threads add models
        models = list(_idle)
    for model in models:
        release(model)
