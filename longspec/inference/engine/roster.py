"""The rows of the next rounds."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from longspec.inference.engine.batch import Batch, Mode
from longspec.inference.engine.rows import Row


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

    @classmethod
    def of(cls, running: list[Row], batch: Batch) -> Roster:
        """running: the rows past prefill."""
        requests = [row.ticket.request for row in running]
        numbers = np.array([row.number for row in running], dtype=np.int64)
        mode = Mode(
            batch.depth > 0 and any(request.speculate for request in requests),
            batch.kind_of([request.sampling for request in requests]),
            details=batch.details,
            scores=any(request.alternatives for request in requests),
        )
        return cls(
            running,
            numbers,
            np.array([row.index for row in running], dtype=np.int64),
            [row.last_used for row in running],
            batch.size_for(int(numbers.max(initial=0)) + 1),
            mode,
            any(request.trace for request in requests),
        )
