"""The choice of a plan before each round, from measured round times and the acceptances so far.

Given the table of times, the choice depends on past rounds only, so a seed always gives the same output.
"""

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from longspec.inference.adaptive.lookup_trace import LookupTrace, TrackedMean
from longspec.inference.adaptive.plans import Plan
from longspec.inference.adaptive.row_spread import RowSpread
from longspec.inference.engine.round_record import RowRound

PRIOR_WEIGHT = 4.0
"""Weight of the priors below, in rounds of a row. With less, a few unlucky rounds end the trees of a whole answer."""
PRIOR_LOOKUP, PRIOR_LOOKUP_WEIGHT = 1.2, 1.0
"""Tokens of a round of lookup, and the weight of this, which is low because every round of any plan tells more."""
PRIOR_FIRST_TREE, PRIOR_MORE_NODES, PRIOR_MORE_LEVELS = 1.3, 0.3, 0.6
"""Accepted tokens of the smallest tree, and additional ones of more nodes, and of more levels once they are reached."""
PRIOR_REACH = 0.5
"""Share of rounds in which the accepted path reaches the last level of a tree."""
MOST_TRACED, MOST_COMPARED = 4, 8
"""Most rows on whose texts lookup is simulated, which stand for all rows. Most rows whose trees are compared after a
round; rows take turns. A row takes the host tens of microseconds, and a round of a small target leaves little time."""
PROBE_SHARE = 0.01
"""Largest share of the time that probes may lose. While no tree is played, only probes notice easier text."""
FIRST_LOSS = 2.0
"""Additional time that they may lose at a time, in rounds of the first plan. Both limits are those of one row. A round
of n rows tells as much as n rounds of one, so they are divided by n, up to PRIOR_WEIGHT: then one probe tells enough.
"""

RoundTime = Callable[[Plan, int], float]
"""The time of a round of a plan, by the number of prefix slots that it reads, summed over rows. Any unit of time."""


@dataclass(frozen=True)
class Decision:
    """The plan of a round."""

    plan: Plan
    loss: float = 0.0
    """Time that a probe is expected to lose."""
    probe_time: float = 0.0
    """Time of a probe; 0 without one."""


class Observed(NamedTuple):
    """A round's result in its rows. Those without tokens do not count."""

    rows: np.ndarray
    """int64 [n], all different."""
    tokens: np.ndarray
    """int64 [n, depth + 1]."""
    counts: np.ndarray
    """int64 [n]: number of valid `tokens`."""
    parts: Sequence[RowRound]
    """For a tree: the rounds of those rows that have tokens."""


class Controller:
    """Chooses plans for one batch.

    - vanilla emits one token per row and round.
    - The rounds of lookup are simulated on the texts of some rows (see `LookupTrace`).
    - A round of a tree tells what trees of fewer nodes and levels would have accepted. Other trees, and every tree
      while none is played, are known from single rounds, the probes. Together they may lose a fixed share of the time,
      so that a plan far from the best one is probed rarely, and one that is nearly as good often. A tree that would not
      win if the target accepted a node in each of its levels is not probed.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        time: RoundTime,
        refill_time: Callable[[], float],
        rows: int,
        spread: RowSpread | None = None,
    ) -> None:
        """plans: vanilla first, trees in ascending order; the last one covers all others. refill_time: the time to
        refill the draft's window, which a tree pays after a round of another plan. rows: largest number of rows.
        spread: None if rows that end get the next requests, or if rounds run over those that are left."""
        self.plans = tuple(plans)
        self.time, self.refill_time = time, refill_time
        self.spread = spread
        self.played: Counter[Plan] = Counter()
        """Number of observed rounds per plan, of those with an active row."""
        self.trees = [plan for plan in plans if plan.kind == "tree"]
        self.lookups = [plan for plan in plans if plan.kind == "lookup"]

        self.traces: dict[int, LookupTrace] = {}
        """Of up to MOST_TRACED active rows."""
        self.lookup_tokens = dict.fromkeys(self.lookups, PRIOR_LOOKUP)
        """Tokens of a round of each lookup plan: the mean over the traced rows, which stays when the last one ends."""
        self.lengths = np.zeros(rows, dtype=np.int64)
        """Tokens of each row."""
        self.active = np.zeros(rows, dtype=bool)
        """bool [rows]: those that rounds advance."""
        self.read = 0
        """Prefix slots that a round reads, summed over rows."""
        self.smaller: dict[Plan, Plan | None] = {
            tree: next((other for other in reversed(self.trees[:number]) if tree.covers(other)), None)
            for number, tree in enumerate(self.trees)
        }
        """The largest tree that each tree covers."""
        self.gains = {tree: TrackedMean(self._prior_gain(tree), PRIOR_WEIGHT) for tree in self.trees}
        """Number of tokens that each tree accepts in addition to that one; in rounds that reach its last level, if the
        tree has more levels."""
        self.reaches = {tree: TrackedMean(PRIOR_REACH, PRIOR_WEIGHT) for tree in self.trees}
        """Share of rounds in which the accepted path reaches the last level of each tree."""

        self.lost = 0.0
        """Time that probes lost beyond their share of the time; negative if they may lose more than FIRST_LOSS."""
        self._current = Decision(self.plans[0])
        """The decision for the newest round."""
        self._playing: deque[Decision] = deque()
        """Decisions for the rounds that were not observed yet."""
        self._next: Decision | None = None
        self._unlearned: list[tuple[Decision, Observed]] = []
        self._compared = 0
        """Number of rounds of trees that were learned from."""

    def start(self, row: int, prompt: np.ndarray, first_token: int, may_stop: bool = True) -> None:
        """Make a row active after prefill. prompt: int64 [P]. may_stop: whether its answer may end before its limit."""
        self._learn()  # its tokens are not those of an earlier request on the row
        if len(self.traces) < MOST_TRACED:
            depths = [plan.nodes - 1 for plan in self.lookups]
            self.traces[row] = LookupTrace(depths, prompt, first_token, PRIOR_LOOKUP, PRIOR_LOOKUP_WEIGHT)
        self.active[row] = True
        if self.spread is not None:
            self.spread.may_stop |= may_stop
        self.lengths[row] = len(prompt) + 1
        self.read += len(prompt) + 1

    def end(self, row: int) -> None:
        """Make a row inactive."""
        if self.active[row]:
            self.active[row] = False
            self.read -= int(self.lengths[row])
            self.traces.pop(row, None)

    def choose(self) -> Plan:
        """The plan of the next round."""
        if self._next is None:
            self._next = self._decide()
        return self._begin(self._next)

    def impose(self, plan: Plan) -> Plan:
        """The next round plays a plan that was not chosen here."""
        if self._next is not None:
            self.lost -= self._next.loss
        return self._begin(Decision(plan))

    def observe(self, observed: Observed) -> None:
        """Take the result of the oldest round that was not observed, rows that have ended included."""
        decision = self._playing.popleft()
        if observed.counts.any():
            self.played[decision.plan] += 1
            self._unlearned.append((decision, observed))

    def think(self) -> None:
        """Learn from the observed rounds, and decide about the next one. To be called while the device plays a round,
        whose result therefore counts for a later one."""
        self._learn()
        if self._next is None and self.active.any():
            self._next = self._decide()

    def _begin(self, decision: Decision) -> Plan:
        self._current, self._next = decision, None
        self._playing.append(decision)
        self.lost -= PROBE_SHARE / self._rows_of_probe * self.time(decision.plan, self.read)
        return decision.plan

    def _expected(self) -> tuple[dict[Plan, float], dict[Plan, float], Plan]:
        """Expected number of tokens per active row and round of each plan, its time, and the plan with most tokens per
        time."""
        for number, plan in enumerate(self.lookups):
            if means := [trace.means[number].value for trace in self.traces.values()]:
                self.lookup_tokens[plan] = sum(means) / len(means)
        expected = dict.fromkeys(self.plans, 1.0) | self.lookup_tokens
        for tree, smaller in self.smaller.items():
            gain = self.gains[tree].value
            if smaller is None:
                expected[tree] = 1.0 + gain
            else:
                opportunities = self.reaches[smaller].value if self._is_deeper(tree) else 1.0
                expected[tree] = expected[smaller] + gain * opportunities
        expected = self._until_the_end(expected)
        times = {plan: self.time(plan, self.read) for plan in self.plans}
        return expected, times, max(self.plans, key=lambda plan: expected[plan] / times[plan])

    def _until_the_end(self, expected: dict[Plan, float]) -> dict[Plan, float]:
        """Tokens per row and round of each plan that count, of `expected` ones per active row."""
        return expected if self.spread is None else self.spread.until_the_end(expected, self.active)

    def _prior_gain(self, tree: Plan) -> float:
        if self.smaller[tree] is None:
            return PRIOR_FIRST_TREE
        return PRIOR_MORE_LEVELS if self._is_deeper(tree) else PRIOR_MORE_NODES

    def _is_deeper(self, tree: Plan) -> bool:
        """Whether a tree has more levels than the largest one that it covers."""
        smaller = self.smaller[tree]
        return smaller is not None and tree.levels > smaller.levels

    @property
    def _rows_of_probe(self) -> float:
        """The rows that share the limits of PROBE_SHARE and FIRST_LOSS."""
        return min(max(1, int(self.active.sum())), PRIOR_WEIGHT)

    def _learn(self) -> None:
        """Learn from the observed rounds: the text, the trees, and the time that a probe has lost."""
        for decision, (rows, tokens, counts, parts) in self._unlearned:
            if self.spread is not None:
                self.spread.add(decision.plan.kind, rows[counts > 0], counts[counts > 0])
            text = np.where(self.active[rows], counts, 0)
            self.lengths[rows] += text
            self.read += int(text.sum())
            places = dict(zip(rows.tolist(), range(len(rows)), strict=True))
            for row, trace in self.traces.items():
                if (place := places.get(row)) is not None:
                    trace.extend(tokens[place, : text[place]].tolist())
            turns = math.ceil(len(parts) / MOST_COMPARED) or 1
            self._compare_trees(decision.plan, parts[self._compared % turns :: turns])
            self._compared += bool(parts)
            if decision.probe_time:  # what it has lost is known now
                expected, times, best = self._expected()
                emitted = self._until_the_end({decision.plan: float(counts[counts > 0].mean())})[decision.plan]
                saved = emitted * times[best] / expected[best]
                self.lost += decision.probe_time - saved - decision.loss
        self._unlearned.clear()

    def _compare_trees(self, plan: Plan, parts: Sequence[RowRound]) -> None:
        """Learn about the trees that a plan covers."""
        accepted: dict[Plan | None, float] = {None: 0.0}
        reached: dict[Plan | None, float] = {}
        for tree, gain in self.gains.items():
            if not plan.covers(tree):
                gain.age()
                self.reaches[tree].age()
                continue
            levels = [part.accepted_by(tree) for part in parts]
            accepted[tree] = sum(map(len, levels)) / len(parts)
            reached[tree] = sum(tree.levels in row for row in levels) / len(parts)
            self.reaches[tree].add(reached[tree], len(parts))
            smaller = self.smaller[tree]
            opportunities = reached[smaller] if self._is_deeper(tree) else 1.0
            if opportunities:
                gain.add((accepted[tree] - accepted[smaller]) / opportunities, len(parts))
            else:
                gain.age()

    def _decide(self) -> Decision:
        """The best plan, or one to probe if there is something to learn and the probes' share of the time allows it."""
        tokens, times, best = self._expected()
        best_speed = tokens[best] / times[best]
        # Playing the best plan teaches about the trees that it covers; about the others only a probe does. Those that
        # would not be faster if the target accepted a node in each of their levels need none.
        unknown = [tree for tree in self.trees if not best.covers(tree) and 1 + tree.levels > best_speed * times[tree]]
        if not unknown:
            return Decision(best)
        refill_time = 0.0 if self._current.plan.kind == "tree" else self.refill_time()
        # The cost of a probe: its time minus the time in which the best plan emits as many tokens.
        losses = {plan: times[plan] + refill_time - tokens[plan] / best_speed for plan in unknown}
        plan = min(unknown, key=losses.__getitem__)
        most = FIRST_LOSS / self._rows_of_probe * times[self.plans[0]]
        limit = most - losses[plan]
        # Little time is saved up for probes, else hours without any would allow many in a row.
        self.lost = max(self.lost, min(limit, 0.0) - most)
        if self.lost > limit:
            return Decision(best)
        self.lost += losses[plan]
        return Decision(plan, losses[plan], times[plan] + refill_time)
