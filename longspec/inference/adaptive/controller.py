"""The choice of a plan before each round, from measured round times and the acceptances so far.

Plain Python: given the table of times, the choice depends on past rounds only, so a seed always gives the same output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from longspec.inference.adaptive.lookup_trace import LookupTrace
from longspec.inference.adaptive.plans import Plan
from longspec.inference.adaptive.tracked_mean import TrackedMean

PRIOR_WEIGHT = 2.0
"""Weight of the priors below, in rounds."""
PRIOR_LOOKUP = 1.2
"""Tokens of a round of lookup."""
PRIOR_FIRST_TREE, PRIOR_MORE_NODES = 1.6, 0.3
"""Accepted tokens of the smallest tree, and additional ones of each larger tree."""
PROBE_SHARES = (0.0075, 0.0025)
"""Largest shares of the time that probes may lose: those of the tree that costs least, and those of the largest tree,
which informs about all others."""
FIRST_LOSSES = (2.0, 1.0)
"""What they may lose in addition, in rounds of the first plan."""

RoundTime = Callable[[Plan, float], float]
"""The time of a round of a plan, by the mean number of prefix slots per row. Any unit of time."""


@dataclass(frozen=True)
class RowRound:
    """The part of a round that one active row played."""

    tokens: Sequence[int]
    """The tokens that the row kept."""
    ranks: Sequence[int] = ()
    """For a tree: the rank of each accepted node among the tree's nodes. The nodes of rank 0 ... n - 1 are those that
    a budget of n nodes would have verified."""


class Controller:
    """Chooses plans for one batch.

    - vanilla emits one token per row and round.
    - The rounds of lookup are simulated on the text (see `LookupTrace`).
    - A round of a tree tells what smaller trees would have accepted. Larger trees, and every tree while none is played,
      are known from single rounds, the probes. Together they may lose a fixed share of the time, so that a plan far
      from the best one is probed rarely, and one that is nearly as good often.
    """

    def __init__(
        self,
        plans: Sequence[Plan],
        time: RoundTime,
        prompts: Sequence[Sequence[int]],
        first_tokens: Sequence[int],
        refill_time: float = 0.0,
    ) -> None:
        """plans: vanilla first, trees in the order of their nodes. refill_time: of the draft, when a tree follows
        another plan."""
        self.plans = tuple(plans)
        self.time = time
        self.refill_time = refill_time
        self.played: Counter[Plan] = Counter()
        """Number of rounds per plan."""
        self.trees = [plan for plan in plans if plan.kind == "tree"]
        self.lookups = [plan for plan in plans if plan.kind == "lookup"]

        depths = [plan.depth for plan in self.lookups]
        self.traces: list[LookupTrace] = []
        for prompt, token in zip(prompts, first_tokens, strict=True):
            means = [TrackedMean(PRIOR_LOOKUP, PRIOR_WEIGHT) for _ in depths]
            self.traces.append(LookupTrace(prompt, depths, means))
            self.traces[-1].extend([token])
        self.gains = [
            TrackedMean(PRIOR_MORE_NODES if number else PRIOR_FIRST_TREE, PRIOR_WEIGHT)
            for number in range(len(self.trees))
        ]
        """Tokens that each tree accepts in addition to those of the next smaller one."""

        self.active = [True] * len(prompts)
        self.elapsed = 0.0
        """Time of all rounds."""
        self.lost = [0.0, 0.0]
        """Time that the probes of either kind lost."""
        self.probe: int | None = None
        """The kind of probe that this round is, as an index of `lost`."""
        self.plan = self.plans[0]
        """The plan of the current round."""
        self.best = self.plans[0]
        """The plan with the highest expected speed."""

    def choose(self) -> Plan:
        """The plan of the next round."""
        self.best = max(self.plans, key=self.speed)
        self.plan = self._due_probe()
        self.played[self.plan] += 1
        self.elapsed += self._time(self.plan)
        return self.plan

    def observe(self, rows: Sequence[RowRound | None], active: Sequence[bool]) -> None:
        """Learn from the round. rows: its part in each row, None for rows that were inactive. active: of the next."""
        for trace, row in zip(self.traces, rows, strict=True):
            if row is not None:
                trace.extend(row.tokens)
        played = [row for row in rows if row is not None]
        self._learn(played)
        if self.probe is not None:
            tokens = sum(len(row.tokens) for row in played) / len(played)
            loss = self._time(self.plan) - tokens / self.speed(self.best)
            self.lost[self.probe] = max(self.lost[self.probe] + loss, 0.0)
        self.active = list(active)

    def tokens(self, plan: Plan) -> float:
        """Expected number of tokens per active row and round."""
        if plan.kind == "tree":
            return 1 + sum(gain.value for gain in self.gains[: self.trees.index(plan) + 1])
        if plan.kind == "lookup":
            number = self.lookups.index(plan)
            means = [
                trace.means[number].value for trace, active in zip(self.traces, self.active, strict=True) if active
            ]
            return sum(means) / max(len(means), 1)
        return 1.0

    def speed(self, plan: Plan) -> float:
        """Expected number of tokens per active row and unit of time."""
        return self.tokens(plan) / self._time(plan)

    def _time(self, plan: Plan) -> float:
        # A round computes all rows, but only active ones read their prefix.
        read = sum(len(trace.tokens) for trace, active in zip(self.traces, self.active, strict=True) if active)
        return self.time(plan, read / len(self.traces))

    def _learn(self, rows: Sequence[RowRound]) -> None:
        """Update the trees' gains."""
        size = self.trees.index(self.plan) + 1 if self.plan.kind == "tree" else 0
        for gain in self.gains[size:]:
            gain.age()
        accepted = 0.0
        for tree, gain in zip(self.trees[:size], self.gains, strict=False):
            within = sum(min(sum(rank < tree.nodes for rank in row.ranks), tree.depth) for row in rows) / len(rows)
            gain.add(within - accepted)
            accepted = within

    def _due_probe(self) -> Plan:
        """The plan to probe; the best one if there is nothing to learn, or the probes' share of the time is spent."""
        self.probe = None
        known = self.trees.index(self.best) + 1 if self.best.kind == "tree" else 0
        unknown = self.trees[known:]
        if not unknown:
            return self.best
        refill_time = 0.0 if self.plan.kind == "tree" else self.refill_time
        losses = [self._time(plan) + refill_time - self.tokens(plan) / self.speed(self.best) for plan in unknown]
        cheapest = min(range(len(unknown)), key=losses.__getitem__)
        for kind, number in enumerate((cheapest, -1)):
            budget = PROBE_SHARES[kind] * self.elapsed + FIRST_LOSSES[kind] * self._time(self.plans[0])
            if self.lost[kind] + losses[number] <= budget:
                self.probe = kind
                self.lost[kind] += refill_time
                return unknown[number]
        return self.best
