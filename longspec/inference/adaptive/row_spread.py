"""What plans are worth to a batch whose rounds run over all rows until the last answer ends.

With vanilla, answers of equal lengths end together. With drafts some rows are faster than others, and the slowest one
decides: a plan of 1.8 tokens per round on the average of the rows may take as many rounds as one of 1.5 in each row.
"""

from collections.abc import Mapping
from statistics import NormalDist

import numpy as np

from longspec.inference.adaptive.plans import Plan

KINDS = ("lookup", "tree")
"""Kinds of plans that accept different numbers of tokens in different rows."""
PRIOR_ROUNDS, PRIOR_VARIANCE = 4.0, 1.0
"""Variance of the accepted tokens of a row between rounds, in units of their squared mean, and the weight of this."""
ALIKE_ROUNDS = 64.0
"""Rounds, summed over rows, after which their differences between rows count half. At first, the slowest row is mostly
an unlucky one."""
LENGTH_DEVIATION = 0.6
"""Standard deviation of the lengths of answers that may end before their limit, in units of the most tokens that one
lacks to it. The more lengths differ, the less the slowest row matters: it rarely has the longest answer."""


class RowSpread:
    """The differences between rows, from the rounds so far."""

    def __init__(self, left: np.ndarray) -> None:
        """left: int64 [rows], changed in place: tokens that the answer of each row lacks to its limit."""
        self.left = left
        self.may_stop = False
        """Whether any answer may end before its limit."""
        self._sums = {kind: np.zeros((3, len(left))) for kind in KINDS}
        """fp64 [3, rows] by kind of plan: number of rounds of each row, and sums over them of its accepted tokens and
        of their squares. The unit of tokens is the mean of a round."""

    def add(self, kind: str, rows: np.ndarray, counts: np.ndarray) -> None:
        """Learn from a round. rows: int64 [n]. counts: int64 [n], their tokens, at least one in each."""
        if kind in KINDS and len(rows) > 1 and (mean := counts.mean() - 1) > 0:
            accepted = (counts - 1) / mean
            self._sums[kind][:, rows] += np.stack([np.ones(len(rows)), accepted, accepted**2])

    def until_the_end(self, expected: Mapping[Plan, float], active: np.ndarray) -> dict[Plan, float]:
        """Tokens per round with which rows that are all alike would need as many rounds to the last answer's end, by
        plan. expected: tokens per active row and round. active: bool [rows]."""
        until_the_end, left = dict(expected), self.left[active].astype(np.float64)
        if len(left) < 2:
            return until_the_end
        lengths = LENGTH_DEVIATION * left.max() if self.may_stop else 0.0
        all_rounds = _expected_maximum(left, np.full(1, lengths))
        rates = {kind: self._rates(kind, active) for kind in KINDS}
        for plan, tokens in expected.items():
            if plan.kind in rates:
                relative, variance = rates[plan.kind]
                tokens_of_row = 1 + (tokens - 1) * relative
                rounds = left / tokens_of_row
                chance = variance * rounds * ((tokens - 1) / tokens_of_row) ** 2
                deviations = np.sqrt((lengths / tokens_of_row) ** 2 + chance)
                until_the_end[plan] = all_rounds / _expected_maximum(rounds, deviations)
        return until_the_end

    def _rates(self, kind: str, active: np.ndarray) -> tuple[np.ndarray, float]:
        """fp64 [n]: accepted tokens of each active row relative to the mean, closer to it the less is known; and the
        variance between the rounds of a row."""
        rounds, sums, squares = self._sums[kind][:, active]
        means = np.divide(sums, rounds, out=np.ones(len(sums)), where=rounds > 0)
        deviations = max(float((squares - rounds * means**2).sum()), 0.0) + PRIOR_ROUNDS * PRIOR_VARIANCE
        within = deviations / (max(float(rounds.sum()) - len(rounds), 0.0) + PRIOR_ROUNDS)
        between = max(float(((means - 1) ** 2 - within / np.maximum(rounds, 1.0)).mean()), 0.0)
        weights = between * rounds / (between * rounds + within) * rounds.sum() / (rounds.sum() + ALIKE_ROUNDS)
        return 1 + weights * (means - 1), within


def _expected_maximum(means: np.ndarray, deviations: np.ndarray) -> float:
    """Of normal variables, approximately. means: fp64 [n]. deviations: fp64 [n] or [1]."""
    latest, deviation = float(means.max()), float(deviations.max())
    if not deviation:
        return latest
    # Those that are far below the largest one hardly count. The quantile is Blom's.
    count = float(np.exp((means - latest) / deviation).sum())
    return latest + deviation * NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
