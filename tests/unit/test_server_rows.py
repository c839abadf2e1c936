"""Which row a request gets, and how much of its prompt is reused."""

from array import array
from typing import Any

import numpy as np
import pytest

from longspec.inference.engine.rows import Rows


def rows(*contents: str, busy: str = "") -> Rows:
    """Rows that hold these characters, used in order; busy: their numbers."""
    made = Rows(len(contents))
    for number, content in enumerate(contents):
        made[number].tokens = array("q", map(ord, content))
        if content:
            made.idle.remove(made[number])
            made.release(made[number])
    for number in map(int, busy):
        made.idle.remove(made[number])
        made[number].job = object()  # type: ignore[assignment]
    return made


@pytest.mark.parametrize(
    ("contents", "busy", "prompt", "expected"),
    [
        (("abcd", "abxy", "zzzz"), "", "abcdef", (0, 0, 4)),  # the conversation goes on
        (("abcd", "abxy", "zzzz"), "", "abcd", (0, 0, 3)),  # its last token is read again
        (("abcd", "abxy", "zzzz"), "0", "abcdef", (1, 0, 4)),  # a running row gives its prefix, the oldest row is taken
        (("abcdefgh", "zzzz", "z"), "", "abczz", (0, 0, 3)),
        (("zzzz", "abcdefgh", "z"), "", "abczz", (0, 1, 3)),  # a long row is kept for a short prefix
        (("abc", "", "z"), "2", "xyz", (1, 1, 0)),  # an empty row first
        (("abcd", "abcd"), "0", "abcde", (1, 1, 4)),  # of equal ones the idle one
        (("abcdefg", "abcd"), "", "abcdx", (1, 1, 4)),  # of equal ones the shorter one
        (("", ""), "", "a", (0, 0, 0)),
    ],
)
def test_choice_of_a_row(contents: tuple[str, ...], busy: str, prompt: str, expected: tuple[int, int, int]) -> None:
    choice = rows(*contents, busy=busy).take(np.array([ord(token) for token in prompt]))
    row, source, length = choice
    assert (row.number, source.number if length else row.number, length) == expected


def test_the_row_unused_for_the_longest_time_is_taken() -> None:
    made: Any = rows("aaaa", "bbbb", "cccc")
    made.idle.remove(made[0])
    made.release(made[0])
    assert made.take(np.array([1, 2, 3]))[0].number == 1
