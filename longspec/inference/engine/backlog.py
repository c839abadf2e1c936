"""Tokens of rounds in which no answer ends: they wait on the host, and clients get those of many rounds at once."""

from collections.abc import Collection

import numpy as np

ROUNDS = 256
"""Rounds whose tokens wait."""


class Backlog:
    """The tokens of the newest rounds, one per row and round. Rows are known by `Row.index`. A round takes the same few
    operations for any number of rows."""

    def __init__(self, rows: int) -> None:
        self.left = np.zeros(rows, dtype=np.int64)
        """Tokens that the answer of each row lacks to its limit."""
        self._stops = np.full((rows, 1), -1)
        self._tokens = np.full((ROUNDS, rows), -1)
        """-1 where a row has no token of a round."""
        self._seconds = np.zeros(ROUNDS)
        self._rounds = 0

    @property
    def is_empty(self) -> bool:
        return self._rounds == 0

    @property
    def is_full(self) -> bool:
        return self._rounds == ROUNDS

    def start(self, row: int, stop_ids: Collection[int]) -> None:
        """Begin an answer that ends with one of some tokens."""
        if (most := len(stop_ids)) > self._stops.shape[1]:
            self._stops = np.pad(self._stops, ((0, 0), (0, most - self._stops.shape[1])), constant_values=-1)
        self._stops[row] = -1
        self._stops[row, :most] = list(stop_ids)

    def add(self, rows: np.ndarray, tokens: np.ndarray, faults: np.ndarray, seconds: float) -> np.ndarray:
        """Add a round of some rows. rows, tokens, faults: int64 [n]; seconds: each row's share of its time. Returns the
        positions in `rows` of those that end with this token or have a fault. Their tokens are left out."""
        assert not self.is_full
        ends = (self.left[rows] <= 1) | (faults != 0) | (tokens[:, None] == self._stops[rows]).any(1)
        others = rows[~ends]
        self._tokens[self._rounds, others] = tokens[~ends]
        self._seconds[self._rounds] = seconds
        self.left[others] -= 1
        self._rounds += 1
        return ends.nonzero()[0]

    def take(self, row: int) -> tuple[list[int], float]:
        """Remove a row's tokens; they and the seconds of their rounds."""
        own = self._tokens[: self._rounds, row]
        waiting = own >= 0
        taken = own[waiting].tolist(), float(self._seconds[: self._rounds][waiting].sum())
        own[:] = -1
        return taken

    def clear(self) -> None:
        """Make room for further rounds. All tokens must have been taken."""
        self._rounds = 0
