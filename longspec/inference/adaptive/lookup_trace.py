"""The rounds that prompt lookup would have played on a text, from the text alone.

Decoding is lossless, so the text does not depend on the plan that is played. The number of tokens that lookup would
have accepted follows from the text, without a single round of lookup.
"""

import math
from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np

from longspec.inference.drafting.lookup import LONGEST_MATCH

LONG_MEMORY, SHORT_MEMORY = 512.0, 16.0
"""Largest weights of the two means, in rounds."""
SIGNIFICANCE = 3.0
"""A difference of the means by more than this number of standard errors is a change."""
RESTART_WEIGHT = 4.0
"""Weight of the long mean after a change, in rounds."""
LEAST_VARIANCE = 0.05
"""Of observations; a constant sequence would make every deviation a change."""
FEW_MATCHES = 16
"""Up to this number, matches are compared faster one by one than as arrays."""
SHORT_DECAY = math.exp(-1 / SHORT_MEMORY)


class TrackedMean:
    """The mean of a sequence of observations. It has a long memory. A mean with a short memory is kept next to it, and
    replaces it when the two differ significantly."""

    def __init__(self, value: float, weight: float) -> None:
        """value, weight: the prior, in observations."""
        self.value = self.recent = value
        self.weight = self.recent_weight = weight
        self.variance = 1.0
        """Of an observation of a single row."""

    def add(self, observation: float, rows: int = 1) -> None:
        """Add the mean of the observations of `rows` rows, which counts as that number of observations."""
        # In local variables: it is called for every token of a traced row.
        weight = min(self.weight + rows, rows * LONG_MEMORY)
        deviation = observation - self.value
        value = self.value + deviation * rows / weight
        self.variance += (deviation * (observation - value) * rows - self.variance) * rows / weight
        self.recent_weight = recent_weight = min(self.recent_weight + rows, rows * SHORT_MEMORY)
        self.recent = recent = self.recent + (observation - self.recent) * rows / recent_weight

        error = max(self.variance, LEAST_VARIANCE) * (1 / weight + 1 / recent_weight)
        if abs(recent - value) > SIGNIFICANCE * math.sqrt(error):
            value, weight = recent, min(recent_weight, RESTART_WEIGHT * rows)
        self.value, self.weight = value, weight

    def age(self) -> None:
        """A round without an observation: the recent ones are less recent."""
        self.recent_weight = max(self.recent_weight * SHORT_DECAY, 1.0)


class LookupTrace:
    """One row: its tokens, and the simulated rounds of a lookup chain of each length in `depths`."""

    def __init__(
        self, depths: Sequence[int], prompt: np.ndarray, first_token: int, prior: float, prior_weight: float
    ) -> None:
        """prompt: int64 [P]. first_token: that of the answer, which is the first root. prior, prior_weight: number of
        tokens of a simulated round, and the weight of this."""
        self.tokens = array("q", prompt.astype(np.int64).tobytes())
        self.tokens.append(first_token)
        self.depths = depths
        self.means = [TrackedMean(prior, prior_weight) for _ in depths]
        """Number of tokens of the simulated rounds, by depth."""
        following = self.following()
        self._chains = [following[:depth] for depth in depths]
        self._matched = [0] * len(depths)
        """Number of tokens of each chain that the text has followed."""

    def extend(self, new_tokens: Sequence[int]) -> None:
        """Take the next tokens of the text."""
        for token in new_tokens:
            self.tokens.append(token)
            following = None
            for number, chain in enumerate(self._chains):
                if (matched := self._matched[number]) < len(chain) and chain[matched] == token:
                    self._matched[number] += 1
                    continue
                # The token is the bonus token of the simulated round, and the root of the next one.
                self.means[number].add(matched + 1)
                following = self.following() if following is None else following
                self._chains[number] = following[: self.depths[number]]
                self._matched[number] = 0

    def following(self) -> list[int]:
        """Up to max(depths) tokens after the longest earlier match of the newest tokens; the latest one among matches
        of a length."""
        tokens = np.frombuffer(self.tokens, dtype=np.int64)
        # A search of the whole text takes microseconds. An index of a long prompt would delay the first round.
        ends: Any = (tokens[:-1] == tokens[-1]).nonzero()[0]
        for back in range(1, min(LONGEST_MATCH, len(tokens))):
            longer: Any
            if len(ends) > FEW_MATCHES:
                longer = ends[ends >= back]
                longer = longer[tokens[longer - back] == tokens[-1 - back]]
            else:
                token = self.tokens[-1 - back]
                longer = [end for end in map(int, ends) if end >= back and self.tokens[end - back] == token]
            if not len(longer):
                break
            ends = longer
        if not len(ends):
            return []
        first = int(ends[-1]) + 1
        return tokens[first : first + max(self.depths)].tolist()
