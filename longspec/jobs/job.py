"""A run over many items in units of work, which the ranks of a launch share. The same command continues it."""

import json
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from longspec.errors import UserError
from longspec.jobs.results import ReadLine, Results, part_path
from longspec.locks import locked_file
from longspec.ranks.replicas import LostRank, Replicas
from longspec.signals import StopSignals, exit_code

T = TypeVar("T")
Unit = TypeVar("Unit")

Identity = Mapping[str, Any]
"""Everything that determines the results of a run, as JSON values."""
DIGESTS = ("target", "draft", "data", "prompts", "target_digest", "files")
"""Entries of identities that are digests of files and prompts."""
Count = Callable[[int, int], None]
"""Counts new tokens and finished items since the last call."""
ITEMS = "items"
"""Name of the shared counter of items that have a result."""
COUNT_S = 0.1
"""Seconds between two looks at the shared counters while a rank decodes."""
TOKENS = "tokens"
"""Name of the shared counter of new tokens."""


@dataclass
class ResumableJob:
    """A rank's view of a run."""

    total: int
    """Number of items."""
    item: str
    """The word for an item."""
    output: Path | None
    """Where the results are; None if a stopped run cannot be continued."""
    stop: StopSignals
    replicas: Replicas
    is_hidden: bool = False
    """Whether there is no progress bar."""
    overwrites: bool = False
    """Whether the command replaces earlier results."""
    is_lost: bool = field(default=False, init=False)
    """Whether another rank has ended during `run`."""

    def run(
        self,
        units: Sequence[Unit],
        load: Callable[[Unit], int],
        work: Callable[[Iterator[Unit], Count], object],
        done: int,
        label: str | None = None,
    ) -> None:
        """Do this rank's share of the units. All ranks must call it with the same units.

        load: the work of a unit, which is balanced over ranks. work: called with this rank's units, of which none
        starts after a rank has received a stop signal. done: number of items that already have a result. label: text
        of the progress bar. Returns once all ranks have finished, or once another rank has ended.
        """
        start = read = time.perf_counter()
        new: Counter[str] = Counter()
        self.replicas.start_counts()
        hidden = self.is_hidden or self.replicas.rank > 0
        with tqdm(total=self.total, initial=done, desc=label, unit=self.item, disable=hidden) as bar:

            def share_counts() -> None:
                nonlocal read
                read = time.perf_counter()
                if all_tokens := self.replicas.count(TOKENS, new.pop(TOKENS, 0)):
                    bar.set_postfix_str(f"{all_tokens / (read - start):,.0f} tokens/s", refresh=False)
                bar.update(self.replicas.count(ITEMS, new.pop(ITEMS, 0)) - bar.n)

            def count(tokens: int = 0, items: int = 0) -> None:
                new[TOKENS] += tokens
                new[ITEMS] += items
                # Each shared counter is a request to rank 0, and there can be thousands of new tokens per second. Items
                # are counted at once, because the line about a rank that ends says how many have a result.
                if items or time.perf_counter() - read > COUNT_S:
                    share_counts()

            try:
                new[ITEMS] = done if self.replicas.rank == 0 else 0
                share_counts()
                share = (units[index] for index in self.replicas.share([load(unit) for unit in units]))
                work(takewhile(lambda unit: not self.is_stopped(), share), count)
                share_counts()
                self.replicas.meet(self.stop, share_counts)
            except LostRank:
                self.is_lost = True

    def is_stopped(self) -> bool:
        """Whether a rank has received a stop signal."""
        return self.replicas.stopped(self.stop)

    def end(self, done: int) -> None:
        """Raise SystemExit if a rank has received a stop signal or has ended, after one line of the launch about it.

        done: number of items that have a result, on rank 0.
        """
        received = self.stop.received
        if not self.is_lost and received is None:
            return
        if self.replicas.reports_loss if self.is_lost else self.replicas.rank == 0:
            done = self.replicas.last_count(ITEMS) if self.is_lost else done
            cause = "a rank has ended" if received is None else f"stopped by {signal.Signals(received).name}"
            print(f"{cause}: {self._state(done)}", file=sys.stderr, flush=True)
        raise SystemExit(1 if received is None else exit_code(received))

    def _state(self, done: int) -> str:
        line = f"{done} of {self.total} {self.item}s are done"
        if self.output is None:
            return line
        line += f", in {self.output}"
        again = "the same command without --overwrite" if self.overwrites and done else "the same command"
        return line if done == self.total else f"{line}; {again} continues"


def agree(prepare: Callable[[], T], identity: Identity, folder: Path, replicas: Replicas) -> T:
    """The result of `prepare()`, which opens the results on rank 0 only, on every rank.

    identity: what determines the run's results. folder: that of the results. Raises UserError if a rank's identity
    differs from that of rank 0, or if it does not see the folder of rank 0.
    """
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
    differing = [name for name in {**stored, **current} if stored.get(name) != current.get(name)]
    values = {name: f"{json.dumps(stored.get(name))} there, {json.dumps(current.get(name))} here" for name in differing}
    return "; ".join(f"{name}: {'other content' if name in DIGESTS else text}" for name, text in values.items())


def open_results(
    open_first: Callable[[], Results], identity: Identity, path: Path, read_line: ReadLine, replicas: Replicas
) -> Results:
    """This rank's results: `open_first()` on rank 0, else an empty part of `path`. Raises UserError as `agree` does."""
    first: list[Results] = []

    def prepare() -> set[int]:
        first.append(open_first())
        return first[0].done

    done = agree(prepare, identity, path.parent, replicas)
    return first[0] if first else Results(part_path(path, replicas.rank), read_line, resume=False, done=done)


def writing(results: Results, replicas: Replicas) -> AbstractContextManager[object]:
    """Context in which each rank may add lines. All ranks must call this. Raises UserError.

    In a launch of several ranks, earlier results that do not belong to the run are removed now.
    """
    with ExitStack() as stack:
        if replicas.size > 1:
            # Before the others open their parts: a rank that dies must not leave parts of an unknown run.
            replicas.from_rank_zero(results.start)
            replicas.together(lambda: stack.enter_context(locked_file(results.path)) if replicas.rank else None)
        return stack.pop_all()
