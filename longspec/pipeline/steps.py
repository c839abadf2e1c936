"""The steps from a target to a measured draft. Each one continues what an earlier run has left, or finds it done."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from longspec.pipeline.answers import CHAT, write_text
from longspec.pipeline.estimates import Estimate
from longspec.pipeline.evaluation import evaluate
from longspec.pipeline.probes import write_probes
from longspec.pipeline.prompts import write_prompts
from longspec.pipeline.settings import Settings
from longspec.pipeline.training import train

TIMES = "seconds.jsonl"
"""File with the seconds of each step and their estimate."""
DONE_S = 3
"""A step that takes less was done before, and says nothing about the speed."""


@dataclass(frozen=True)
class Step:
    name: str
    run: Callable[[], object]


def steps_of(settings: Settings, root: Path) -> list[Step]:
    """The steps in order, with the names of the estimate (see `estimates`)."""
    steps = [
        Step("chat", partial(write_text, [CHAT], settings, root)),
        Step("prompts", partial(write_prompts, settings, root)),
    ]
    if settings.answers:
        steps.append(Step("answers", partial(write_text, list(settings.answers), settings, root)))
    if settings.probes:
        steps.append(Step("probes", partial(write_probes, settings, root)))
    steps += [Step(name, partial(train, name, settings, root)) for name in settings.training.stages]
    return [*steps, Step("evaluation", partial(evaluate, settings, root))]


def run_steps(steps: Sequence[Step], root: Path, planned: Estimate) -> None:
    """Run the steps in order. Before each one, print its number and the time left.

    The time left follows from the estimate, corrected by the speed of the steps that this run has done.
    """
    spent = expected = 0.0
    for number, step in enumerate(steps, 1):
        pace = spent / expected if expected else 1.0
        left = sum(planned.seconds[later.name] for later in steps[number - 1 :]) * pace
        own = planned.seconds[step.name] * pace
        print(f"step {number} of {len(steps)}: {step.name}, {duration(own)}; {duration(left)} left in all", flush=True)
        began = time.perf_counter()
        step.run()
        seconds = time.perf_counter() - began
        if seconds > DONE_S:
            spent, expected = spent + seconds, expected + planned.seconds[step.name]
            line = {"step": step.name, "seconds": round(seconds, 1), "estimate": round(planned.seconds[step.name], 1)}
            with (root / TIMES).open("a") as times:
                times.write(json.dumps(line) + "\n")


def duration(seconds: float) -> str:
    """Text such as "about 12 min"."""
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    return f"about {round(seconds / 60)} min" if seconds < 5400 else f"about {seconds / 3600:,.1f} hours"
