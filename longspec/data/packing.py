"""Packing of short samples into rows of a fixed length."""

import heapq
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
    """Pack by worst fit decreasing: each sample, longest first, goes into the row with the most room.

    lengths: [samples] in tokens, all in 1 … max_length. Rows are in the order in which they were opened. Do not shuffle
    them here: the sampler shuffles, and two permutations can undo each other.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    # Stable, so that equal lengths keep their order and the result does not depend on NumPy.
    order = np.argsort(-lengths, kind="stable")
    row_of = np.empty(len(order), dtype=np.int64)
    heap: list[tuple[int, int]] = []  # -room and number of each row
    for sample, length in enumerate(tqdm(lengths[order].tolist(), desc="Packing", unit=" samples")):
        if heap and heap[0][0] + length <= 0:
            room, row = heap[0]
            heapq.heapreplace(heap, (room + length, row))
        else:
            row = len(heap)
            heapq.heappush(heap, (length - max_length, row))
        row_of[sample] = row
    starts = np.concatenate([[0], np.cumsum(np.bincount(row_of, minlength=len(heap)))])
    return Rows(order[np.argsort(row_of, kind="stable")], starts)
