"""Packing: every sample once, in no more rows than a best fit needs."""

import numpy as np
import pytest

from longspec.data.packing import pack


def best_fit_rows(lengths, max_length):
    """The number of rows of a best-fit-decreasing packing that looks at every open row."""
    room = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in range(len(room)) if room[row] >= length]
        if not fitting:
            room.append(max_length)
            fitting = [len(room) - 1]
        room[min(fitting, key=lambda row: room[row])] -= length
    return len(room)


@pytest.mark.parametrize("max_length", [7, 64, 1024])
def test_rows_hold_each_sample_once_and_are_as_few_as_those_of_a_best_fit(max_length):
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(1, max_length + 1, 300)
        rows = pack(lengths, max_length)
        assert sorted(rows.samples.tolist()) == list(range(len(lengths)))
        assert max(int(lengths[row].sum()) for row in rows) <= max_length
        assert len(rows) <= 1.01 * best_fit_rows(lengths.tolist(), max_length)


def test_full_and_single_rows():
    rows = pack(np.array([8, 8, 3, 5]), 8)
    assert sorted(tuple(row) for row in rows) == [(0,), (1,), (3, 2)]
    assert len(pack(np.array([], dtype=int), 8)) == 0
