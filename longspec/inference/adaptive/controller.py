"""The choice of a plan before each round, from measured round times and the acceptances so far.

Plain Python: given the table of times, the choice depends on past rounds only, so a seed always gives the same output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from longspec.inference.adaptive.lookup_trace import LookupTrace
from longspec.inference.adaptive.plans import Plan
from longspec.inference.adaptive.tracked_mean import TrackedMean

PRIOR_WEIGHT = 2.0
"""Weight of the priors below, in rounds."""
PRIOR_LOOKUP = 1.2
"""Tokens of a round of lookup."""
PRIOR_FIRST_TREE, PRIOR_LARGER_TREE = 1.3, 0.3
"""Accepted tokens of the smallest tree, and additional ones of a larger tree."""
PROBE_SHARES = (0.0075, 0.0025)
"""Largest shares of the time that probes may lose: probes of the cheapest tree, and probes of the largest tree, which
informs about all others."""
FIRST_LOSSES = (2.0, 1.0)
"""Additional time that they may lose, in rounds of the first plan."""

RoundTime = Callable[[Plan, int], float]
"""The time of a round of a plan, by the number of prefix slots that it reads, summed over rows. Any unit of time."""


@dataclass(frozen=True)
class RowRound:
    """The part of a round that one active row played."""

    tokens: Sequence[int]
    """The tokens that the row kept."""
    ranks: Sequence[int] = ()
    """For a tree: the rank of each accepted node among the tree's nodes. The nodes of rank 0 ... n - 1 are those that
    a budget of n nodes would have verified."""
    levels: Sequence[int] = ()
    """For a tree: the number of levels that the draft has to grow for the node of each rank; 0 for lookup's."""

    def accepted_by(self, tree: Plan) -> int:
        """Number of tokens that a tree which this one covers would have accepted.

        A tree of fewer levels verifies more nodes of these levels. Those that this round did not verify are missing,
        so the number is a lower bound.
        """
        verified = [rank for rank, level in enumerate(self.levels) if level <= tree.levels][: tree.nodes]
        return len(set(self.ranks).intersection(verified))


@dataclass(frozen=True)
class Decision:
    """The plan of a round."""

    plan: Plan
    probe: int | None = None
    """For a probe: its kind, as an index of PROBE_SHARES."""
    loss: float = 0.0
    """Time that a probe is expected to lose."""
    expected_tokens: float = 0.0
    """Tokens per row that a probe is expected to emit."""
    best_speed: float = 0.0
    """Tokens per row and unit of time that the best plan was expected to emit at the time of a probe."""


class Controller:
    """Chooses plans for one batch.

    - vanilla emits one token per row and round.
    - The rounds of lookup are simulated on the text (see `LookupTrace`).
    - A round of a tree tells what trees of fewer nodes and levels would have accepted. Other trees, and every tree
      while none is played, are known from single rounds, the probes. Together they may lose a fixed share of the time,
      so that a plan far from the best one is probed rarely, and one that is nearly as good often.
    """

    def __init__(self, plans: Sequence[Plan], time: RoundTime, refill_time: float = 0.0) -> None:
        """plans: vanilla first, trees in ascending order; the last one covers all others. refill_time: the time to
        refill the draft's ring, which a tree pays after a round of another plan."""
        self.plans = tuple(plans)
        self.time = time
        self.refill_time = refill_time
        self.played: Counter[Plan] = Counter()
        """Number of rounds per plan."""
        self.trees = [plan for plan in plans if plan.kind == "tree"]
        self.lookups = [plan for plan in plans if plan.kind == "lookup"]

        self.traces: dict[Hashable, LookupTrace] = {}
        """The active rows."""
        self.smaller: dict[Plan, Plan | None] = {
            tree: next((other for other in reversed(self.trees[:number]) if tree.covers(other)), None)
            for number, tree in enumerate(self.trees)
        }
        """The largest tree that each tree covers."""
        self.gains = {
            tree: TrackedMean(PRIOR_LARGER_TREE if smaller else PRIOR_FIRST_TREE, PRIOR_WEIGHT)
            for tree, smaller in self.smaller.items()
        }
        """Number of tokens that each tree accepts in addition to that one."""

        self.elapsed = 0.0
        """Time of all rounds."""
        self.lost = [0.0, 0.0]
        """Time that the probes of either kind lost."""
        self._current = Decision(self.plans[0])
        """About the newest round."""
        self._next: Decision | None = None
        self._unlearned: list[tuple[Decision, Mapping[Hashable, RowRound]]] = []

    def new_trace(self) -> LookupTrace:
        """A row that has not read its prompt yet."""
        means = [TrackedMean(PRIOR_LOOKUP, PRIOR_WEIGHT) for _ in self.lookups]
        return LookupTrace([plan.nodes - 1 for plan in self.lookups], means)

    def start(self, row: Hashable, trace: LookupTrace, first_token: int) -> None:
        """Make a row active after prefill."""
        trace.extend([first_token])
        self.traces[row] = trace

    def end(self, row: Hashable) -> None:
        """Make a row inactive."""
        self.traces.pop(row, None)

    def choose(self) -> Plan:
        """The plan of the next round."""
        if self._next is None:
            self._next = self._decide()
        return self._begin(self._next)

    def impose(self, plan: Plan) -> Plan:
        """The next round plays a plan that was not chosen here."""
        if self._next is not None and self._next.probe is not None:
            self.lost[self._next.probe] -= self._next.loss
        return self._begin(Decision(plan))

    def observe(self, parts: Mapping[Hashable, RowRound]) -> None:
        """Take the result of the round: its part in each row, rows that have ended included."""
        self._unlearned.append((self._current, parts))

    def think(self) -> None:
        """Learn from the observed rounds, and decide about the next one. To be called while the device plays a round,
        whose result therefore counts for the round after the next one."""
        for decision, parts in self._unlearned:
            for row, part in parts.items():
                if row in self.traces:
                    self.traces[row].extend(part.tokens)
            self._learn(decision, list(parts.values()))
        self._unlearned.clear()
        if self.traces and self._next is None:
            self._next = self._decide()

    def _begin(self, decision: Decision) -> Plan:
        self._current, self._next = decision, None
        self.played[decision.plan] += 1
        self.elapsed += self._time(decision.plan)
        return decision.plan

    def tokens(self, plan: Plan) -> float:
        """Expected number of tokens per active row and round."""
        if plan.kind == "tree":
            smaller = self.smaller[plan]
            return self.gains[plan].value + (1.0 if smaller is None else self.tokens(smaller))
        if plan.kind == "lookup":
            number = self.lookups.index(plan)
            means = [trace.means[number].value for trace in self.traces.values()]
            return sum(means) / len(means)
        return 1.0

    def speed(self, plan: Plan) -> float:
        """Expected number of tokens per active row and unit of time."""
        return self.tokens(plan) / self._time(plan)

    def _time(self, plan: Plan) -> float:
        return self.time(plan, sum(len(trace.tokens) for trace in self.traces.values()))

    def _learn(self, decision: Decision, parts: Sequence[RowRound]) -> None:
        """Update the trees' gains and the time that probes have lost."""
        accepted: dict[Plan | None, float] = {None: 0.0}
        for tree, gain in self.gains.items():
            if decision.plan.covers(tree):
                accepted[tree] = sum(part.accepted_by(tree) for part in parts) / len(parts)
                gain.add(accepted[tree] - accepted[self.smaller[tree]])
            else:
                gain.age()
        if decision.probe is not None:
            tokens = sum(len(part.tokens) for part in parts) / len(parts)
            surplus = (decision.expected_tokens - tokens) / decision.best_speed
            self.lost[decision.probe] = max(self.lost[decision.probe] + surplus, 0.0)

    def _decide(self) -> Decision:
        """The best plan, or one to probe if there is something to learn and the probes' share of the time allows it."""
        best = max(self.plans, key=self.speed)
        best_speed = self.speed(best)
        # Playing the best plan teaches about the trees that it covers; about the others only a probe does.
        unknown = [tree for tree in self.trees if not best.covers(tree)]
        if not unknown:
            return Decision(best)
        refill_time = 0.0 if self._current.plan.kind == "tree" else self.refill_time
        # The cost of a probe: its time minus the time in which the best plan emits as many tokens.
        losses = [self._time(plan) + refill_time - self.tokens(plan) / best_speed for plan in unknown]
        cheapest = min(range(len(unknown)), key=losses.__getitem__)
        for kind, number in enumerate((cheapest, len(unknown) - 1)):
            budget = PROBE_SHARES[kind] * self.elapsed + FIRST_LOSSES[kind] * self._time(self.plans[0])
            if self.lost[kind] + losses[number] <= budget:
                self.lost[kind] += losses[number]
                plan = unknown[number]
                return Decision(plan, kind, losses[number], self.tokens(plan), best_speed)
        return Decision(best)
