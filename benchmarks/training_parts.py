"""Time of a training step by part, from events on the device's stream, and by kernel, from a profile."""

from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from longspec.ranks.agreement import Termination
from longspec.train.trainer import Trainer

PARTS = ("target", "draft", "loss", "backward", "optimizer")
"""Parts of a step in the order in which they run; `optimizer` is all that DeepSpeed does after the backward pass."""
KERNELS = 20
"""Number of rows of a profile."""


class Clock:
    """Records the times at which the device reaches named marks."""

    def __init__(self) -> None:
        self.on_gpu = torch.cuda.is_available()
        self.marks: list[tuple[str, Any]] = []

    def mark(self, name: str) -> None:
        """Mark the end of the part `name`."""
        if self.on_gpu:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.append((name, event))
        else:
            self.marks.append((name, perf_counter()))

    def shares(self) -> dict[str, float]:
        """Share of each part in the time from the first mark to the last; a part ends at the mark with its name."""
        if self.on_gpu:
            torch.cuda.synchronize()
        spent = dict.fromkeys(PARTS, 0.0)
        for (_, before), (name, now) in zip(self.marks, self.marks[1:], strict=False):
            spent[name] = spent.get(name, 0.0) + (before.elapsed_time(now) if self.on_gpu else now - before)
        whole = sum(spent.values())
        return {name: spent[name] / whole for name in PARTS}


def timed_parts(trainer: Trainer, step: int, termination: Termination) -> dict[str, float]:
    """Shares of a step's time on the device, by PARTS."""
    clock = Clock()
    with marked(trainer.engine, clock):
        clock.mark("start")
        trainer.steps.take(step, termination)
    return clock.shares()


@contextmanager
def marked(engine: Any, clock: Clock) -> Iterator[None]:
    """Mark the ends of the parts on `clock` while the context is active."""
    draft = engine.module.draft_model
    hooks = [
        draft.register_forward_pre_hook(lambda *_: clock.mark("target")),
        draft.register_forward_hook(lambda *_: clock.mark("draft")),
    ]
    backward, step = engine.backward, engine.step

    def timed_backward(loss: Any) -> None:
        clock.mark("loss")
        backward(loss)
        clock.mark("backward")

    def timed_step() -> None:
        step()
        clock.mark("optimizer")

    engine.backward, engine.step = timed_backward, timed_step
    try:
        yield
    finally:
        del engine.backward, engine.step  # the methods of the class apply again
        for hook in hooks:
            hook.remove()


def profile(trainer: Trainer, step: int, termination: Termination) -> str:
    """The operators and kernels of a step that take most of the device's time, as torch's profiler lists them."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    kinds += [torch.profiler.ProfilerActivity.CUDA] if torch.cuda.is_available() else []
    with torch.profiler.profile(activities=kinds) as profiler:
        trainer.steps.take(step, termination)
    order = f"self_{'cuda' if torch.cuda.is_available() else 'cpu'}_time_total"
    return profiler.key_averages().table(sort_by=order, row_limit=KERNELS, max_name_column_width=90)
