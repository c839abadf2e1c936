"""The choice of a plan before each round, from measured round times and the acceptances so far.

Plain Python: given the table of times, the choice depends on past rounds only, so a seed always gives the same output.
"""

from collections import Counter, deque
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass

from longspec.inference.adaptive.lookup_trace import LookupTrace, TrackedMean
from longspec.inference.adaptive.plans import Plan
from longspec.inference.engine.round_record import RowRound

PRIOR_WEIGHT = 4.0
"""Weight of the priors below, in rounds. With less, a few unlucky rounds end the trees of a whole answer."""
PRIOR_LOOKUP = 1.2
"""Tokens of a round of lookup."""
PRIOR_FIRST_TREE, PRIOR_MORE_NODES, PRIOR_MORE_LEVELS = 1.3, 0.3, 0.6
"""Accepted tokens of the smallest tree, and additional ones of more nodes, and of more levels once they are reached."""
PRIOR_REACH = 0.5
"""Share of rounds in which the accepted path reaches the last level of a tree."""
PROBE_SHARE = 0.01
"""Largest share of the time that probes may lose. While no tree is played, only probes notice easier text."""
FIRST_LOSS = 2.0
"""Additional time that they may lose, in rounds of the first plan."""

RoundTime = Callable[[Plan, int], float]
"""The time of a round of a plan, by the number of prefix slots that it reads, summed over rows. Any unit of time."""


@dataclass(frozen=True)
class Decision:
    """The plan of a round."""

    plan: Plan
    loss: float = 0.0
    """Time that a probe is expected to lose."""
    expected_tokens: float = 0.0
    """Tokens per row that a probe is expected to emit."""
    best_speed: float = 0.0
    """Tokens per row and unit of time that the best plan was expected to emit at the time of a probe; 0 without one."""


class Controller:
    """Chooses plans for one batch.

    - vanilla emits one token per row and round.
    - The rounds of lookup are simulated on the text (see `LookupTrace`).
    - A round of a tree tells what trees of fewer nodes and levels would have accepted. Other trees, and every tree
      while none is played, are known from single rounds, the probes. Together they may lose a fixed share of the time,
      so that a plan far from the best one is probed rarely, and one that is nearly as good often.
    """

    def __init__(self, plans: Sequence[Plan], time: RoundTime, refill_time: Callable[[], float] = lambda: 0.0) -> None:
        """plans: vanilla first, trees in ascending order; the last one covers all others. refill_time: the time to
        refill the draft's window, which a tree pays after a round of another plan."""
        self.plans = tuple(plans)
        self.time = time
        self.refill_time = refill_time
        self.played: Counter[Plan] = Counter()
        """Number of observed rounds per plan, of those with an active row."""
        self.trees = [plan for plan in plans if plan.kind == "tree"]
        self.lookups = [plan for plan in plans if plan.kind == "lookup"]

        self.traces: dict[Hashable, LookupTrace] = {}
        """The active rows."""
        self.read = 0
        """Prefix slots that a round reads, summed over rows."""
        self.smaller: dict[Plan, Plan | None] = {
            tree: next((other for other in reversed(self.trees[:number]) if tree.covers(other)), None)
            for number, tree in enumerate(self.trees)
        }
        """The largest tree that each tree covers."""
        self.gains: dict[Plan, TrackedMean] = {}
        """Number of tokens that each tree accepts in addition to that one; in rounds that reach its last level, if the
        tree has more levels."""
        for tree, smaller in self.smaller.items():
            more = PRIOR_MORE_LEVELS if self._is_deeper(tree) else PRIOR_MORE_NODES
            self.gains[tree] = TrackedMean(PRIOR_FIRST_TREE if smaller is None else more, PRIOR_WEIGHT)
        self.reaches = {tree: TrackedMean(PRIOR_REACH, PRIOR_WEIGHT) for tree in self.trees}
        """Share of rounds in which the accepted path reaches the last level of each tree."""

        self.elapsed = 0.0
        """Time of all rounds."""
        self.lost = 0.0
        """Time that probes lost."""
        self._current = Decision(self.plans[0])
        """The decision for the newest round."""
        self._playing: deque[Decision] = deque()
        """Decisions for the rounds that were not observed yet."""
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
        self.read += len(trace.tokens)

    def end(self, row: Hashable) -> None:
        """Make a row inactive."""
        if (trace := self.traces.pop(row, None)) is not None:
            self.read -= len(trace.tokens)

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

    def observe(self, parts: Mapping[Hashable, RowRound]) -> None:
        """Take the result of the oldest round that was not observed: its part in each row that was active, rows that
        have ended included."""
        decision = self._playing.popleft()
        if parts:
            self.played[decision.plan] += 1
        self._unlearned.append((decision, parts))

    def think(self) -> None:
        """Learn from the observed rounds, and decide about the next one. To be called while the device plays a round,
        whose result therefore counts for a later one."""
        for decision, parts in self._unlearned:
            for row, part in parts.items():
                if (trace := self.traces.get(row)) is not None:
                    trace.extend(part.tokens)
                    self.read += len(part.tokens)
            if parts:
                self._learn(decision, list(parts.values()))
        self._unlearned.clear()
        if self.traces and self._next is None:
            self._next = self._decide()

    def _begin(self, decision: Decision) -> Plan:
        self._current, self._next = decision, None
        self._playing.append(decision)
        self.elapsed += self._time(decision.plan)
        return decision.plan

    def tokens(self, plan: Plan) -> float:
        """Expected number of tokens per active row and round."""
        if plan.kind == "tree":
            gain, smaller = self.gains[plan].value, self.smaller[plan]
            if smaller is None:
                return 1 + gain
            return self.tokens(smaller) + gain * (self.reaches[smaller].value if self._is_deeper(plan) else 1.0)
        if plan.kind == "lookup":
            number = self.lookups.index(plan)
            means = [trace.means[number].value for trace in self.traces.values()]
            return sum(means) / len(means)
        return 1.0

    def speed(self, plan: Plan) -> float:
        """Expected number of tokens per active row and unit of time."""
        return self.tokens(plan) / self._time(plan)

    def _is_deeper(self, tree: Plan) -> bool:
        """Whether a tree has more levels than the largest one that it covers."""
        smaller = self.smaller[tree]
        return smaller is not None and tree.levels > smaller.levels

    def _time(self, plan: Plan) -> float:
        return self.time(plan, self.read)

    def _learn(self, decision: Decision, parts: Sequence[RowRound]) -> None:
        """Update the trees' gains and the time that probes have lost."""
        accepted: dict[Plan | None, float] = {None: 0.0}
        reached: dict[Plan | None, float] = {}
        for tree, gain in self.gains.items():
            if not decision.plan.covers(tree):
                gain.age()
                self.reaches[tree].age()
                continue
            levels = [part.accepted_by(tree) for part in parts]
            accepted[tree] = sum(map(len, levels)) / len(parts)
            reached[tree] = sum(tree.levels in row for row in levels) / len(parts)
            self.reaches[tree].add(reached[tree])
            smaller = self.smaller[tree]
            opportunities = reached[smaller] if self._is_deeper(tree) else 1.0
            if opportunities:
                gain.add((accepted[tree] - accepted[smaller]) / opportunities)
            else:
                gain.age()
        if decision.best_speed:
            tokens = sum(len(part.tokens) for part in parts) / len(parts)
            surplus = (decision.expected_tokens - tokens) / decision.best_speed
            self.lost = max(self.lost + surplus, 0.0)

    def _decide(self) -> Decision:
        """The best plan, or one to probe if there is something to learn and the probes' share of the time allows it."""
        best = max(self.plans, key=self.speed)
        best_speed = self.speed(best)
        # Playing the best plan teaches about the trees that it covers; about the others only a probe does.
        unknown = [tree for tree in self.trees if not best.covers(tree)]
        if not unknown:
            return Decision(best)
        refill_time = 0.0 if self._current.plan.kind == "tree" else self.refill_time()
        # The cost of a probe: its time minus the time in which the best plan emits as many tokens.
        losses = {plan: self._time(plan) + refill_time - self.tokens(plan) / best_speed for plan in unknown}
        plan = min(unknown, key=losses.__getitem__)
        budget = PROBE_SHARE * self.elapsed + FIRST_LOSS * self._time(self.plans[0])
        if self.lost + losses[plan] > budget:
            return Decision(best)
        self.lost += losses[plan]
        return Decision(plan, losses[plan], self.tokens(plan), best_speed)
