"""Short samples into sequences of a fixed length, with as little padding as can be had quickly."""

from dataclasses import dataclass

import numpy as np

from longspec.extras import extra

with extra("train"):
    from datasets.utils.tqdm import tqdm  # silent on the ranks where tokenising is


@dataclass(frozen=True)
class Rows:
    """Which samples lie in which row: row r holds `samples[starts[r]:starts[r + 1]]`."""

    samples: np.ndarray  # int64 [samples]
    starts: np.ndarray  # int64 [rows + 1]

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, row: int) -> np.ndarray:
        row = range(len(self))[row]
        return self.samples[self.starts[row] : self.starts[row + 1]]


def pack(lengths: np.ndarray, max_length: int) -> Rows:
    """Best fit decreasing: each sample, longest first, goes where it leaves the least room.

    `lengths` [samples] in tokens, all in 1 … max_length (ValueError otherwise). Rows come in the order in which they
    were begun, and only a sampler should draw them in another: two permutations can undo each other.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    if len(lengths) and (lengths.min() < 1 or lengths.max() > max_length):
        raise ValueError(f"sample lengths must lie in 1 … {max_length}, not {lengths.min()} … {lengths.max()}")
    order = np.argsort(-lengths, kind="stable")
    row_of, count = _best_fit(lengths[order].tolist(), max_length)
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=count))])
    return Rows(order[np.argsort(row_of, kind="stable")], starts)


def _best_fit(lengths: list[int], max_length: int) -> tuple[np.ndarray, int]:
    """The row of each length, and how many rows there are.

    Open rows are kept by the room left in them. Bit r of `rooms` is set while some row has exactly r tokens left, so
    the best fit for a length is the lowest bit that is set from there on.
    """
    by_room: list[list[int]] = [[] for _ in range(max_length + 1)]
    rooms = 0
    row_of = np.empty(len(lengths), dtype=np.int64)
    count = 0
    for sample, length in enumerate(tqdm(lengths, desc="Packing", unit=" samples")):
        fitting = rooms >> length
        if fitting:
            room = length + (fitting & -fitting).bit_length() - 1
            row = by_room[room].pop()
            if not by_room[room]:
                rooms ^= 1 << room
        else:
            room, row = max_length, count
            count += 1
        left = room - length
        if left and not by_room[left]:
            rooms |= 1 << left
        by_room[left].append(row)
        row_of[sample] = row
    return row_of, count
