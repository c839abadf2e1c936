"""A tree shape is taken for the default only where its gain stands out of the spread between places."""

import math

import pytest

from longspec.inference.tree_shapes import PREFIXES, MeasuredShape, _prefix_lengths, gain_over, surely_fastest

DEFAULT, DEEP, WIDE = (4, 16), (1, 1, 1), (8, 8)


def shape_of(shape: tuple[int, ...], rounds: list[int], round_s: float = 1.0) -> MeasuredShape:
    """32 tokens a place."""
    return MeasuredShape(shape, [32] * len(rounds), rounds, [round_s] * len(rounds))


def test_one_place_that_loops_does_not_decide() -> None:
    """Pooled the deep tree is ahead, for the sake of a single place; as much everywhere is a gain."""
    default = shape_of(DEFAULT, [12, 12, 12, 12, 12, 12, 12, 12])
    once, everywhere = shape_of(DEEP, [12, 12, 12, 12, 12, 12, 12, 4]), shape_of(DEEP, [11] * 8)
    assert once.tokens_per_second == everywhere.tokens_per_second > default.tokens_per_second
    assert surely_fastest([default, once]) == DEFAULT
    assert surely_fastest([default, everywhere]) == DEEP


def test_the_fastest_of_those_that_are_surely_faster_is_taken() -> None:
    """Not the one that seems the fastest of all, and none that is slower."""
    default, little, more = shape_of(DEFAULT, [12] * 4), shape_of(DEEP, [11] * 4), shape_of(WIDE, [10] * 4)
    unsure, slow = shape_of((2, 2), [12, 12, 12, 1]), shape_of((1,), [12] * 4, 2.0)
    assert unsure.tokens_per_second > more.tokens_per_second
    assert surely_fastest([default, little, more, unsure, slow]) == WIDE
    assert surely_fastest([default, slow]) == DEFAULT


def test_a_single_place_keeps_the_default() -> None:
    assert surely_fastest([shape_of(DEFAULT, [12]), shape_of(DEEP, [3])]) == DEFAULT


def test_speed_pools_tokens_over_the_seconds_of_all_places() -> None:
    row = MeasuredShape(DEEP, [30, 2], [10, 2], [0.1, 0.5])
    assert row.tokens_per_second == pytest.approx(32 / (10 * 0.1 + 2 * 0.5))
    assert row.speed([1]) == pytest.approx(2.0)
    assert row.acceptance_length == pytest.approx(32 / 12)


def test_the_standard_error_is_that_of_a_mean_where_the_gain_is_one() -> None:
    """Of gains that differ little the jackknife gives their standard deviation over the root of their number."""
    seconds = [1.00, 1.01, 0.99, 1.02]
    default, row = shape_of(DEFAULT, [10] * 4), MeasuredShape(DEEP, [32] * 4, [10] * 4, seconds)
    mean = sum(seconds) / 4
    deviation = math.sqrt(sum((one - mean) ** 2 for one in seconds) / 3)
    gain, error = gain_over(row, default)
    assert gain == pytest.approx(-math.log(mean))
    assert error == pytest.approx(deviation / mean / 2, rel=0.01)


def test_places_lie_in_the_latter_half_of_every_row() -> None:
    """However long the others are; none is there twice."""
    short, long = zip(*_prefix_lengths([100, 16384]), strict=True)
    assert short[0] == 100 and long[0] == 16384
    assert len(set(short)) == len(set(long)) == PREFIXES
    assert min(short) > 50 and min(long) > 8192
    assert _prefix_lengths([1, 1]) == [[1, 1]] and _prefix_lengths([2]) == [[2]]
