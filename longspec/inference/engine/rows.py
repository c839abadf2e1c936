"""The host's record of the rows: which tokens the cache holds, and which request each row answers."""

from array import array
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from longspec.inference.engine.batch import Batch
from longspec.inference.engine.requests import Ticket
from longspec.inference.engine.rounds import Mode


@dataclass(eq=False)
class Row:
    number: int
    index: int
    """Stays when the row's number changes."""
    tokens: "array[int]" = field(default_factory=lambda: array("q"))
    """The tokens whose keys and values the cache holds, by position; their number is the row's length there."""
    last_used: int = 0
    """Order in which rows became idle; 0 for one that never held a request."""
    job: Ticket | None = None

    @property
    def ticket(self) -> Ticket:
        """The request of a busy row."""
        assert self.job is not None
        return self.job

    @property
    def unread(self) -> int:
        """Number of prompt tokens that a busy row has not read."""
        return len(self.ticket.prompt) - len(self.tokens)


class Rows:
    """All rows, by number."""

    def __init__(self, count: int, least_shared: int | None) -> None:
        """least_shared: tokens of a prefix from which on a request reuses those that a row holds; None for never."""
        self._rows = [Row(number, number) for number in range(count)]
        self._least_shared = least_shared
        self.idle = deque(self._rows)
        """Rows without a request, in the order of their release or, after `sort_idle`, of their numbers."""
        self._releases = 0

    def __getitem__(self, number: int) -> Row:
        return self._rows[number]

    def busy(self) -> list[Row]:
        """Rows that hold a request."""
        return [row for row in self._rows if row.job is not None]

    def running(self) -> list[Row]:
        """Rows past prefill, which take part in rounds."""
        return [row for row in self._rows if row.job is not None and row.job.root is not None]

    def take(self, prompt: np.ndarray) -> tuple[Row, Row, int]:
        """An idle row for a prompt, int64 [P], the row with the longest prefix in common with it, and its length, less
        than P. These are one row where a conversation goes on; else the idle row is the first one."""
        row = source = self.idle[0]
        length = 0
        # The last token of the prompt is never reused: its hidden state is needed and is not in the cache.
        least = self._least_shared
        near: list[Row] = []
        if least is not None and len(prompt) > least:
            head = prompt[:least].tobytes()
            near = [other for other in self._rows if other.tokens[:least].tobytes() == head]
        if near:
            lengths = {other.number: common_prefix(prompt[:-1], other.tokens) for other in near}
            # Among equal prefixes, take that of the row that loses least.
            source = max(near, key=lambda other: (lengths[other.number], other.job is None, -len(other.tokens)))
            length = lengths[source.number]
            # A row that would lose most of its tokens keeps them: its own conversation may go on.
            if source.job is None and 2 * length >= len(source.tokens):
                row = source
        self.idle.remove(row)
        return row, source, length

    def release(self, row: Row) -> None:
        """Make a row idle; its tokens stay."""
        self._releases += 1
        row.last_used = self._releases
        row.job = None
        self.idle.append(row)

    def sort_idle(self) -> None:
        """Put the idle rows in order of number, in which requests without a prefix to reuse take them."""
        self.idle = deque(sorted(self.idle, key=lambda row: row.number))

    def swap(self, a: Row, b: Row) -> None:
        a.number, b.number = b.number, a.number
        self._rows[a.number], self._rows[b.number] = a, b


class Roster(NamedTuple):
    """The running rows, and what their rounds have in common. It stays the same until a row starts, ends or moves."""

    rows: list[Row]
    numbers: np.ndarray
    """int64 [n]: those of the rows."""
    indices: np.ndarray
    """int64 [n]: their `Row.index`."""
    last_used: list[int]
    """Those of the rows, which change when their requests end."""
    size: int
    """Rows of a round that covers them."""
    mode: Mode
    """Without the plan of method "auto"."""
    traced: bool
    """Whether any request asks for trees."""
    draws: bool
    """Whether any request has a seed and is not greedy."""

    @classmethod
    def of(cls, running: list[Row], batch: Batch) -> "Roster":
        """running: the rows past prefill."""
        requests = [row.ticket.request for row in running]
        numbers = np.array([row.number for row in running], dtype=np.int64)
        mode = Mode(
            batch.depth > 0 and any(request.speculate for request in requests),
            batch.kind_of([request.sampling for request in requests]),
            details=batch.details,
            scores=batch.details and any(request.alternatives for request in requests),
        )
        return cls(
            running,
            numbers,
            np.array([row.index for row in running], dtype=np.int64),
            [row.last_used for row in running],
            batch.size_for(int(numbers.max(initial=0)) + 1),
            mode,
            batch.details and any(request.trace for request in requests),
            any(request.sampling.seed is not None and not request.sampling.greedy for request in requests),
        )


def common_prefix(ids: np.ndarray, tokens: "np.ndarray | array[int]") -> int:
    """Number of leading tokens that are equal. ids, tokens: int64."""
    if (shared := min(len(ids), len(tokens))) == 0:
        return 0
    is_different = ids[:shared] != np.frombuffer(tokens, dtype=np.int64, count=shared)
    return int(is_different.argmax()) if is_different.any() else shared
