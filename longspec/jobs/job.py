"""A run over many items in units of work, which the ranks of a launch share. The same command continues it."""

import json
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from longspec.errors import UserError
from longspec.jobs.results import ReadLine, Results
from longspec.ranks.replicas import Replicas
from longspec.signals import StopSignals, exit_code

T = TypeVar("T")
Unit = TypeVar("Unit")

Identity = Mapping[str, Any]
"""Everything that determines the results of a run, as JSON values."""
DIGESTS = ("target", "draft", "data", "prompts", "target_digest", "files")
"""Entries of identities that are digests of files and prompts."""
Count = Callable[[int], None]
"""Counts items that are finished now."""


@dataclass
class ResumableJob:
    """A rank's view of a run."""

    total: int
    item: str
    """The word for an item."""
    output: Path | None
    """Where the results are; None if a stopped run cannot be continued."""
    stop: StopSignals
    replicas: Replicas
    is_hidden: bool = False
    overwrites: bool = False
    """Whether the command replaces earlier results."""

    def run(
        self,
        units: Sequence[Unit],
        load: Callable[[Unit], int],
        work: Callable[[Iterator[Unit], Count], object],
        done: int,
        label: str | None = None,
    ) -> None:
        """Do this rank's share of the units. All ranks must call it with the same units.

        load: the amount of work of a unit. work: called with this rank's units, of which none starts after a rank has
        received a stop signal. done: number of items that already have a result. Returns once all ranks have finished.
        """
        self.replicas.start_count()
        hidden = self.is_hidden or self.replicas.rank > 0
        with tqdm(total=self.total, initial=done, desc=label, unit=self.item, disable=hidden) as bar:

            def count(items: int) -> None:
                bar.update(done + self.replicas.count(items) - bar.n)

            share = (units[index] for index in self.replicas.share([load(unit) for unit in units]))
            work(takewhile(lambda unit: not self.is_stopped(), share), count)
            self.replicas.meet(self.stop, lambda: count(0))

    def is_stopped(self) -> bool:
        """Whether a rank has received a stop signal."""
        return self.replicas.stopped(self.stop)

    def end(self, done: int) -> None:
        """Raise SystemExit if a rank has received a stop signal, after one line. done: number of results, on rank 0."""
        if (received := self.stop.received) is None:
            return
        if self.replicas.rank == 0:
            line = f"stopped by {signal.Signals(received).name}: {done} of {self.total} {self.item}s are done"
            if self.output is not None:
                line += f", in {self.output}"
                if done < self.total:
                    again = " without --overwrite" if self.overwrites and done else ""
                    line += f"; the same command{again} continues"
            print(line, file=sys.stderr, flush=True)
        raise SystemExit(exit_code(received))


def agree(prepare: Callable[[], T], identity: Identity, folder: Path, replicas: Replicas) -> T:
    """Rank 0's `prepare()`, on every rank. Raises UserError if identities differ or ranks do not share the folder."""
    prepared, first_identity = replicas.from_rank_zero(lambda: (prepare(), identity))
    replicas.check_shared(folder)

    def check() -> None:
        # A copy of the data or the weights on another host may be older.
        if differing := differences(first_identity, identity):
            raise UserError(f"the run differs from that of rank 0 ({differing}); all hosts must have the same inputs")

    replicas.together(check)
    return prepared


def differences(stored: Identity, current: Identity) -> str:
    """The entries that differ between two identities; empty if none does."""
    # As JSON stores it: tuples become lists.
    stored, current = (json.loads(json.dumps(identity)) for identity in (stored, current))
    return "; ".join(_differing(stored, current))


def _differing(stored: Identity, current: Identity, prefix: str = "") -> Iterator[str]:
    """The entries that differ, also those of mappings; prefix: precedes their names."""
    for name in {**stored, **current}:
        there, here = stored.get(name), current.get(name)
        # Older files lack entries that are null; a null in a mapping is a value.
        if there == here and (not prefix or (name in stored) == (name in current)):
            continue
        if name in DIGESTS and not prefix:
            yield f"{name}: other content"
        elif isinstance(there, dict) and isinstance(here, dict):
            yield from _differing(there, here, f"{prefix}{name}.")
        else:
            texts = (json.dumps(own.get(name)) if name in own or not prefix else "not set" for own in (stored, current))
            yield f"{prefix}{name}: {' there, '.join(texts)} here"


def open_results(
    open_first: Callable[[], Results], identity: Identity, path: Path, read_line: ReadLine, replicas: Replicas
) -> Results:
    """This rank's results: `open_first()` on rank 0, else an empty part of `path`. Raises UserError as `agree` does."""
    first: list[Results] = []

    def prepare() -> set[int]:
        first.append(open_first())
        return first[0].done

    done = agree(prepare, identity, path.parent, replicas)
    results = first[0] if first else Results(path, read_line, rank=replicas.rank)
    results.done = done
    return results
