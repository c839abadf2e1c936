"""Packing: every sample once, no row too long, little padding, deterministic and fast."""

import numpy as np
import pytest

from longspec.data.packing import pack


def realistic_lengths(count, max_length, seed=0):
    """Many short documents, a few long ones, and full pieces of split ones."""
    lengths = np.random.default_rng(seed).lognormal(np.log(max_length * 0.3), 1.0, count).astype(int)
    return np.clip(lengths, 2, max_length)


def naive_best_fit(lengths, max_length):
    """Number of rows of a best-fit-decreasing packing that looks at every open row."""
    room = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in range(len(room)) if room[row] >= length]
        if not fitting:
            room.append(max_length)
            fitting = [len(room) - 1]
        best = min(fitting, key=lambda row: room[row])
        room[best] -= length
    return sorted(max_length - left for left in room)


def check(rows, lengths, max_length):
    assert sorted(rows.samples.tolist()) == list(range(len(lengths)))
    filled = [int(lengths[row].sum()) for row in rows]
    assert all(0 < tokens <= max_length for tokens in filled)
    return filled


@pytest.mark.parametrize("max_length", [7, 64, 1024])
def test_rows_are_those_of_the_naive_best_fit(max_length):
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(1, max_length + 1, 300)
        filled = check(pack(lengths, max_length), lengths, max_length)
        assert sorted(filled) == naive_best_fit(lengths.tolist(), max_length)


@pytest.mark.parametrize("max_length", [1024, 32768])
def test_realistic_lengths_fill_rows_to_97_percent(max_length):
    lengths = realistic_lengths(5000, max_length)
    rows = pack(lengths, max_length)
    check(rows, lengths, max_length)
    assert lengths.sum() / (len(rows) * max_length) >= 0.97


def test_full_and_single_rows():
    rows = pack(np.array([8, 8, 3, 5]), 8)
    assert sorted(tuple(row) for row in rows) == [(0,), (1,), (3, 2)]
    assert len(pack(np.array([], dtype=int), 8)) == 0


@pytest.mark.parametrize("length", [0, 9])
def test_lengths_out_of_range_are_refused(length):
    with pytest.raises(ValueError, match="must be in 1 … 8"):
        pack(np.array([4, length]), 8)
