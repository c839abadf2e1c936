"""The simulated rounds of lookup, as arrays over all rows: those of a plain loop over the tokens of each row."""

import math
from random import Random

import numpy as np
import pytest

from longspec.inference.adaptive import lookup_trace
from longspec.inference.adaptive.lookup_trace import LookupTraces, TrackedMeans
from longspec.inference.drafting.lookup import LONGEST_MATCH

DEPTHS = (4, 15)


class Mean:
    """A `TrackedMeans` of one mean, in Python numbers."""

    def __init__(self, value: float, weight: float) -> None:
        self.value = self.recent = value
        self.weight = self.recent_weight = weight
        self.variance = 1.0

    def add(self, observation: float) -> None:
        self.weight = min(self.weight + 1, lookup_trace.LONG_MEMORY)
        deviation = observation - self.value
        self.value += deviation / self.weight
        self.variance += (deviation * (observation - self.value) - self.variance) / self.weight
        self.recent_weight = min(self.recent_weight + 1, lookup_trace.SHORT_MEMORY)
        self.recent += (observation - self.recent) / self.recent_weight
        error = max(self.variance, lookup_trace.LEAST_VARIANCE) * (1 / self.weight + 1 / self.recent_weight)
        if abs(self.recent - self.value) > lookup_trace.SIGNIFICANCE * math.sqrt(error):
            self.value, self.weight = self.recent, min(self.recent_weight, lookup_trace.RESTART_WEIGHT)


class PlainTrace:
    """One row of `LookupTraces`."""

    def __init__(self, prompt: list[int], first_token: int) -> None:
        self.tokens = [*prompt, first_token]
        self.means = [Mean(1.2, 4.0) for _ in DEPTHS]
        self.chains = [self.following()[:depth] for depth in DEPTHS]
        self.matched = [0 for _ in DEPTHS]

    def extend(self, tokens: list[int]) -> None:
        for token in tokens:
            self.tokens.append(token)
            for number, depth in enumerate(DEPTHS):
                if self.chains[number][self.matched[number] :][:1] == [token]:
                    self.matched[number] += 1
                else:
                    self.means[number].add(self.matched[number] + 1)
                    self.chains[number], self.matched[number] = self.following()[:depth], 0

    def following(self) -> list[int]:
        text = self.tokens
        for size in range(LONGEST_MATCH, 0, -1):
            for end in range(len(text) - 1, size - 1, -1):
                if text[end - size : end] == text[-size:]:
                    return text[end : end + max(DEPTHS)]
        return []


@pytest.mark.parametrize("vocab", [2, 6, 300])
def test_arrays_over_rows_give_what_a_loop_over_tokens_gives(vocab: int) -> None:
    """To the bit. Rows get different numbers of tokens, some have none, and some begin a new text."""
    random = Random(vocab)
    traces = LookupTraces(5, 800, DEPTHS, 1.2, 4.0)
    plain: dict[int, PlainTrace] = {}

    def token(row: int) -> int:
        """Half of the text continues what it copies."""
        text = plain[row].tokens
        return text[len(text) // 3] if random.random() < 0.5 else random.randrange(vocab)

    for step in range(300):
        for row in range(5):
            if step == 0 or random.random() < 0.01:
                prompt = [random.randrange(vocab) for _ in range(random.randrange(1, 30))]
                traces.start(row, np.array(prompt), 1)
                plain[row] = PlainTrace(prompt, 1)
        rows = np.array(random.sample(range(5), random.randrange(1, 6)))
        tokens = np.array([[token(row) for _ in range(6)] for row in rows.tolist()])
        counts = np.array([random.choice((0, 1, 1, 2, 6)) for _ in rows])
        traces.extend(rows, tokens, counts)
        for row, own, count in zip(rows.tolist(), tokens.tolist(), counts.tolist(), strict=True):
            plain[row].extend(own[:count])
        values = [[plain[row].means[number].value for row in range(5)] for number in range(len(DEPTHS))]
        assert traces.means.values.tolist() == values
        assert traces.lengths.tolist() == [len(plain[row].tokens) for row in range(5)]


def test_an_observation_of_many_rows_outweighs_a_prior_as_those_of_each_row() -> None:
    together, apart = TrackedMeans(np.array([2.0]), 4.0), TrackedMeans(np.array([2.0]), 4.0)
    index = (np.array([0]),)
    together.add(index, np.array([1.5]), 8)
    for _ in range(8):
        apart.add(index, np.array([1.5]))
    assert together.values[0] == pytest.approx(apart.values[0]) == pytest.approx((4 * 2.0 + 8 * 1.5) / 12)
