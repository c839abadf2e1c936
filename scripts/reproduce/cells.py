"""A grid of measurements: its cells, the time that each may take, and the file that keeps what is done."""

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec.inference.methods import DEFAULT_SHAPE

CELLS = "cells.jsonl"
CELL_FIELDS = ("name", "temperature", "task", "context", "seed")


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
    tree_shape: tuple[int, ...] = DEFAULT_SHAPE
    tree_rule: str = "reject"
    tasks: tuple[str, ...] = ()
    """None means all."""
    longest_contexts: int = 0
    """So many of the longest contexts; 0 means all."""

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
        return dict(zip(CELL_FIELDS, self.key, strict=True))


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    """The key of the cell that a line tells of."""
    return tuple(line[name] for name in CELL_FIELDS)


class CellLog:
    """A JSON line for each cell, in `path`; where a cell has several, it was gone on with, and the last counts.

    A line that was cut off by the end of a process is dropped.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.cells = {key_of(line): line for line in read_cells(path)} if path.exists() else {}
        path.write_text("".join(json.dumps(line) + "\n" for line in self.cells.values()))

    def is_done(self, cell: Cell) -> bool:
        """Whether the cell has all of its samples, or cannot have them."""
        line = self.cells.get(cell.key)
        return line is not None and ("failed" in line or len(line["samples"]) == line["planned"])

    def samples(self, cell: Cell) -> list[dict[str, Any]]:
        """What there is of the cell."""
        return list(self.cells[cell.key]["samples"]) if cell.key in self.cells else []

    def append(self, line: dict[str, Any]) -> None:
        with self.path.open("a") as handle:
            handle.write(json.dumps(line) + "\n")
        self.cells[key_of(line)] = line


def read_cells(path: Path) -> list[dict[str, Any]]:
    """The last whole line of each cell in a log."""
    found = {}
    for text in path.read_text().split("\n")[:-1]:
        try:
            line = json.loads(text)
        except ValueError:
            break
        found[key_of(line)] = line
    return list(found.values())


class Budget:
    """Deals out a time limit by shares; what a part leaves over, or takes too much, those behind it share."""

    def __init__(self, limit_s: float, shares: Sequence[float]) -> None:
        self.start = time.monotonic()
        self.limit_s = limit_s
        self.shares = list(shares)
        self.end = 0.0

    def next_part(self) -> None:
        left, total = self.limit_s - self.passed(), sum(self.shares)
        self.end = self.passed() + max(0.0, left) * self.shares.pop(0) / total

    @contextmanager
    def uncharged(self) -> Iterator[None]:
        """For what is done in here the whole pays, and not the part that runs."""
        began = self.passed()
        try:
            yield
        finally:
            self.end = min(self.limit_s, self.end + self.passed() - began)

    def passed(self) -> float:
        return time.monotonic() - self.start

    def left(self) -> float:
        """Seconds for the part that runs."""
        return self.end - self.passed()

    def share_of(self, cells: int) -> float:
        """Seconds for the next of so many cells: up to twice its even share, because cells differ, of what is left."""
        return min(self.left(), 2 * self.left() / cells)
