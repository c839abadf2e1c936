"""Packing: every sample once, in the rows of a plain best fit."""

import numpy as np
import pytest

from longspec.data.packing import pack


def naive_best_fit(lengths, max_length):
    """The tokens of each row of a best-fit-decreasing packing that looks at every open row, ascending."""
    room = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in range(len(room)) if room[row] >= length]
        if not fitting:
            room.append(max_length)
            fitting = [len(room) - 1]
        best = min(fitting, key=lambda row: room[row])
        room[best] -= length
    return sorted(max_length - left for left in room)


@pytest.mark.parametrize("max_length", [7, 64, 1024])
def test_rows_are_those_of_the_naive_best_fit(max_length):
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(1, max_length + 1, 300)
        rows = pack(lengths, max_length)
        assert sorted(rows.samples.tolist()) == list(range(len(lengths)))
        filled = [int(lengths[row].sum()) for row in rows]
        assert sorted(filled) == naive_best_fit(lengths.tolist(), max_length)
