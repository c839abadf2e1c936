"""The rounds that prompt lookup would have played on the texts of a batch, from the texts alone.

Decoding is lossless, so a text does not depend on the plan that is played. The number of tokens that lookup would have
accepted follows from the text, without a single round of lookup. All rows are processed as arrays, because a round of
64 rows would take a quarter of a millisecond row by row.
"""

import math
from collections.abc import Sequence

import numpy as np

from longspec.inference.drafting.lookup import LONGEST_MATCH

LONG_MEMORY, SHORT_MEMORY = 512.0, 16.0
MEMORIES = np.array([[LONG_MEMORY], [SHORT_MEMORY]])
"""Largest weights of the two means, in rounds."""
SIGNIFICANCE = 3.0
"""A difference of the means by more than this number of standard errors is a change."""
RESTART_WEIGHT = 4.0
"""Weight of the long mean after a change, in rounds."""
LEAST_VARIANCE = 0.05
"""Of observations; a constant sequence would make every deviation a change."""
SEARCHED = 2**16
"""Tokens that are searched at once, which stay in a core's cache."""
SHORT_DECAY = math.exp(-1 / SHORT_MEMORY)


class TrackedMeans:
    """The means of sequences of observations. Each has a long memory. A mean with a short memory is kept next to it,
    and replaces it when the two differ significantly."""

    def __init__(self, values: np.ndarray, weight: float) -> None:
        """values, weight: the priors, in observations."""
        self._state = np.empty((5, *values.shape))
        """Means [2], of long and of short memory; their weights [2]; the variance of an observation of a single row."""
        self.values = self._state[0]
        self.reset((...,), values, weight)

    def reset(self, index: tuple, values: np.ndarray | float, weight: float) -> None:
        """Give some of the means their priors."""
        means, weights, variance = self._state[:2], self._state[2:4], self._state[4]
        means[(slice(None), *index)], weights[(slice(None), *index)], variance[index] = values, weight, 1.0

    def add(self, index: tuple, observations: np.ndarray, rows: int = 1) -> None:
        """Add an observation to each of the means at an index of arrays [n]. observations: float64 [n], each the mean
        of those of `rows` rows, which counts as that number of observations."""
        state = self._state[(slice(None), *index)]
        means, weights, variance = state[:2], state[2:4], state[4]
        weights += rows
        np.minimum(weights, rows * MEMORIES, out=weights)
        deviations = observations - means
        means += deviations * rows / weights
        variance += (deviations[0] * (observations - means[0]) * rows - variance) * rows / weights[0]

        error = np.maximum(variance, LEAST_VARIANCE) * (1 / weights).sum(axis=0)
        has_changed = np.abs(means[1] - means[0]) > SIGNIFICANCE * np.sqrt(error)
        if has_changed.any():
            means[0, has_changed] = means[1, has_changed]
            weights[0, has_changed] = np.minimum(weights[1, has_changed], RESTART_WEIGHT * rows)
        self._state[(slice(None), *index)] = state

    def age(self, unobserved: np.ndarray) -> None:
        """A round without an observation of some means, a mask: the recent ones are less recent."""
        recent_weights = self._state[3]
        np.maximum(recent_weights * SHORT_DECAY, 1.0, out=recent_weights, where=unobserved)


class LookupTraces:
    """The text of each row, and the simulated rounds of a lookup chain of each length in `depths`."""

    def __init__(self, rows: int, capacity: int, depths: Sequence[int], prior: float, weight: float) -> None:
        """capacity: most tokens of a text. prior, weight: number of tokens of a round, and the weight of this."""
        self.depths = np.array(depths, dtype=np.int64)[:, None]
        self.prior, self.weight = prior, weight
        self.texts = np.zeros((rows, capacity), dtype=np.int32)
        self.lengths = np.zeros(rows, dtype=np.int64)
        shape = len(depths), rows
        self.means = TrackedMeans(np.full(shape, prior), weight)
        """[D, rows]: tokens of a simulated round."""
        self._chains = np.zeros((3, *shape), dtype=np.int64)
        """The chain of the simulated round: the places in the text of its first token, of its next one, and its end."""

    def start(self, row: int, prompt: np.ndarray, first_token: int) -> None:
        """Take the prompt of a row, int64 [P], and the first token of its answer, which is the first root."""
        length = len(prompt)
        self.texts[row, :length] = prompt
        self.texts[row, length] = first_token
        self.lengths[row] = length + 1
        self.means.reset((slice(None), row), self.prior, self.weight)
        rows = np.array([row])
        self._begin_chains(self._chains[:, :, row : row + 1], np.ones((len(self.depths), 1), dtype=bool), rows)

    def extend(self, rows: np.ndarray, tokens: np.ndarray, counts: np.ndarray) -> None:
        """Take the next tokens of some rows. rows: int64 [n], all different; the first counts[i] of tokens[i] count."""
        for step in range(int(counts.max(initial=0))):
            going_on = (counts > step).nonzero()[0]
            self._append(rows[going_on], tokens[going_on, step])

    def _append(self, rows: np.ndarray, tokens: np.ndarray) -> None:
        """Take the next token of each of some rows."""
        lengths = self.lengths[rows]
        self.texts[rows, lengths] = tokens
        self.lengths[rows] = lengths + 1
        chains = self._chains[:, :, rows]
        first, following, end = chains
        follows = (following < end) & (self.texts[rows, following] == tokens)
        following += follows
        # A token that does not follow is the bonus token of the simulated round, and the root of the next one.
        misses = ~follows
        numbers, positions = misses.nonzero()
        if len(numbers):
            self.means.add((numbers, rows[positions]), (following - first)[misses] + 1.0)
            self._begin_chains(chains, misses, rows)
        self._chains[:, :, rows] = chains

    def _begin_chains(self, chains: np.ndarray, begins: np.ndarray, rows: np.ndarray) -> None:
        """Let the chains [3, D, n] of some rows begin after their newest tokens, where begins, bool [D, n], says so."""
        lengths = self.lengths[rows]
        starts, own = lengths.copy(), np.flatnonzero(begins.any(axis=0))
        starts[own] = self.following(rows[own])
        np.copyto(chains[:2], starts, where=begins)
        np.copyto(chains[2], np.minimum(starts + self.depths, lengths), where=begins)

    def following(self, rows: np.ndarray) -> np.ndarray:
        """The places int64 [n] after the longest earlier match of the newest tokens of some rows, the latest one among
        matches of a length; the end of the text without a match."""
        lengths = self.lengths[rows]
        longest = int(lengths.max())
        if (parts := min(len(rows), len(rows) * longest // SEARCHED)) > 1:
            return np.concatenate([self.following(part) for part in np.array_split(rows, parts)])
        # A search of the whole text takes microseconds. An index of a long prompt would delay the first round.
        texts = self.texts[rows, :longest]
        each = np.arange(len(rows))
        found, ends = np.divmod(np.flatnonzero(texts == texts[each, lengths - 1][:, None]), longest)
        is_match = ends < lengths[found] - 1
        starts = lengths.copy()
        for back in range(LONGEST_MATCH):
            if back:
                is_match = (ends >= back) & (texts[found, ends - back] == texts[found, lengths[found] - 1 - back])
            found, ends = found[is_match], ends[is_match]
            if not len(ends):
                break
            starts[found] = ends + 1  # where a row has several, the last one stays
        return starts
