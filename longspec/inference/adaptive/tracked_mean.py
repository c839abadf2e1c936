"""A running mean that is precise while the text stays as it is, and starts anew when it changes."""

from __future__ import annotations

import math

LONG_MEMORY, SHORT_MEMORY = 512.0, 16.0
"""Largest weights of the two means, in observations."""
SIGNIFICANCE = 3.0
"""A difference of the means by more than this number of standard errors is a change."""
RESTART_WEIGHT = 4.0
"""Weight of the long mean after a change, in observations."""
LEAST_VARIANCE = 0.05
"""Of observations; a constant sequence would make every deviation a change."""
SHORT_DECAY = math.exp(-1 / SHORT_MEMORY)


class TrackedMean:
    """The mean of a sequence of observations.

    It has a long memory. A mean with a short memory is kept next to it, and replaces it when the two differ
    significantly.
    """

    def __init__(self, value: float, weight: float) -> None:
        """value, weight: the prior, in observations."""
        self.value = value
        self.weight = weight
        self.variance = 1.0
        """Of the observations."""
        self.recent = value
        self.recent_weight = weight

    def add(self, observation: float) -> None:
        self.weight = min(self.weight + 1, LONG_MEMORY)
        deviation = observation - self.value
        self.value += deviation / self.weight
        self.variance += (deviation * (observation - self.value) - self.variance) / self.weight
        self.recent_weight = min(self.recent_weight + 1, SHORT_MEMORY)
        self.recent += (observation - self.recent) / self.recent_weight

        error = max(self.variance, LEAST_VARIANCE) * (1 / self.weight + 1 / self.recent_weight)
        if abs(self.recent - self.value) > SIGNIFICANCE * math.sqrt(error):
            self.value = self.recent
            self.weight = min(self.recent_weight, RESTART_WEIGHT)

    def age(self) -> None:
        """A round without an observation: the recent ones are less recent."""
        self.recent_weight = max(self.recent_weight * SHORT_DECAY, 1.0)
