"""A grid of measurements: its cells, the time that each may take, and the file that keeps what is done."""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec.inference.tree_shapes import DEFAULT_SHAPE

CELLS = "cells.jsonl"


@dataclass(frozen=True)
class Measurement:
    """A way to decode, and on how much it is measured."""

    name: str
    """In the results."""
    method: str = ""
    """Of `generate`, or one of the baselines; by default what its name says."""
    temperature: float = 0.0
    prompts: int = 4
    """Of each task and context."""
    seeds: int = 1
    share: float = 1.0
    """Of the evaluation's time, beside the others' shares."""
    tree_shape: tuple[int, ...] | str = DEFAULT_SHAPE
    tree_rule: str = "reject"
    tasks: tuple[str, ...] = ()
    """None means all."""
    longest_contexts: int = 0
    """So many of the longest contexts; 0 means all."""
    new_tokens: int = 0
    """0 means as many as the evaluation says."""

    @property
    def kind(self) -> str:
        return self.method or self.name


@dataclass(frozen=True)
class Cell:
    measurement: Measurement
    task: str
    context: int
    seed: int

    @property
    def key(self) -> tuple[Any, ...]:
        return self.measurement.name, self.measurement.temperature, self.task, self.context, self.seed

    def describe(self) -> dict[str, Any]:
        return dict(zip(("name", "temperature", "task", "context", "seed"), self.key, strict=True))


class CellLog:
    """A JSON line for each cell that is done, in `path`; a line that was cut off by the end of a process is dropped."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.lines = read_cells(path) if path.exists() else []
        path.write_text("".join(json.dumps(line) + "\n" for line in self.lines))

    @property
    def done(self) -> set[tuple[Any, ...]]:
        return {tuple(line[name] for name in ("name", "temperature", "task", "context", "seed")) for line in self.lines}

    def append(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as handle:
            handle.write(json.dumps(line) + "\n")
        self.lines.append(line)


def read_cells(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a log."""
    lines = []
    for text in path.read_text().split("\n")[:-1]:
        try:
            lines.append(json.loads(text))
        except ValueError:
            break
    return lines


class Clock:
    """Deals out a time limit by shares; what a part leaves over goes to those behind it."""

    def __init__(self, limit_s: float, shares: list[float]) -> None:
        self.start = time.monotonic()
        self.limit_s = limit_s
        ends = [sum(shares[: number + 1]) / sum(shares) for number in range(len(shares))]
        self.ends = iter(ends)
        self.end = 0.0

    def next_part(self) -> None:
        self.end = next(self.ends) * self.limit_s

    def passed(self) -> float:
        return time.monotonic() - self.start

    def left(self) -> float:
        """Seconds for the part that runs."""
        return self.end - self.passed()

    def share_of(self, cells: int) -> float:
        """Seconds for the next of so many cells: up to twice its even share, because cells differ, of what is left."""
        return min(self.left(), 2 * self.left() / cells)
