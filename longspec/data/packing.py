"""Packing of short samples into rows of a fixed length."""

from dataclasses import dataclass

import numpy as np

from longspec.extras import extra

with extra("train"):
    # Unlike tqdm's own, it is silent where `datasets.disable_progress_bars` was called.
    from datasets.utils.tqdm import tqdm


@dataclass(frozen=True)
class Rows:
    """Sample numbers of each row. Row r holds `samples[starts[r]:starts[r + 1]]`."""

    samples: np.ndarray
    """Sample numbers in order of rows, int64 [samples]."""
    starts: np.ndarray
    """Start of each row in `samples`, and the end of the last one, int64 [rows + 1]."""

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        row = range(len(self))[row]
        return self.samples[self.starts[row] : self.starts[row + 1]]


def pack(lengths: np.ndarray, max_length: int) -> Rows:
    """Pack by best fit decreasing: each sample, longest first, goes into the row where it leaves the least room.

    lengths: [samples] in tokens, all in 1 … max_length. Rows are in the order in which they were
    opened. Do not shuffle them here: the sampler shuffles, and two permutations can undo each other.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    # Stable, so that equal lengths keep their order and the result does not depend on NumPy.
    order = np.argsort(-lengths, kind="stable")
    row_of, row_count = _best_fit(lengths[order].tolist(), max_length)
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=row_count))])
    return Rows(order[np.argsort(row_of, kind="stable")], starts)


def _best_fit(lengths: list[int], max_length: int) -> tuple[np.ndarray, int]:
    """The row of each sample, int64 [samples], and the number of rows.

    Open rows are grouped by their room, the number of tokens that still fit. Bit r of `rooms` is set while some row has
    room for exactly r tokens, so the best fit for a length is the lowest set bit from there on.
    """
    rows_by_room: list[list[int]] = [[] for _ in range(max_length + 1)]
    # A Python integer as a bit set: one shift finds the best fit among thousands of rows.
    rooms = 0
    row_of = np.empty(len(lengths), dtype=np.int64)
    row_count = 0
    for sample, length in enumerate(tqdm(lengths, desc="Packing", unit=" samples")):
        if fitting := rooms >> length:
            # x & -x isolates the lowest set bit.
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_by_room[room].pop()
            if not rows_by_room[room]:
                rooms ^= 1 << room
        else:
            room = max_length
            row = row_count
            row_count += 1
        room_left = room - length
        # A full row takes part in no further search.
        if room_left and not rows_by_room[room_left]:
            rooms |= 1 << room_left
        rows_by_room[room_left].append(row)
        row_of[sample] = row
    return row_of, row_count
