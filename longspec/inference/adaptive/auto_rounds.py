"""Rounds of method "auto" on one engine: a round per plan, their measured times, and the controller that chooses."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median

import torch
from torch import Tensor

from longspec.inference.adaptive.controller import Controller, RowRound
from longspec.inference.adaptive.plan_drafters import PlanDrafters
from longspec.inference.adaptive.plans import Plan
from longspec.inference.adaptive.time_cache import RoundTimes, cache_file, cache_key, load_times, store_times
from longspec.inference.capture import generator_of
from longspec.inference.engine import Engine, Round, Rounds
from longspec.inference.round_source import Origin, playable
from longspec.inference.stats import GenerationStats

REPLAYS = 3
"""Rounds of each plan that are timed at each of two contexts, after one that is not."""
LOW_CONTEXT = 64
"""Prefix slots per row of the shorter context, at most half of the longer one."""

Clock = Callable[[], float]
"""Returns the time in seconds."""


class PlanRounds(Rounds):
    """The rounds of one plan."""

    def round(self, active: Tensor) -> tuple[Tensor, ...]:
        """Play a round. Returns tokens and counts as in `Rounds.round`, and the ranks of the accepted path [B, depth +
        1] if the plan is a tree."""
        played = self.play(active)
        ranks = played.proposal.ranks
        if ranks is None:
            return played.tokens, played.counts
        return played.tokens, played.counts, ranks.gather(1, played.accepted.path)


class AutoRounds:
    """Plays the plan that a controller chooses before each round."""

    def __init__(self, engine: Engine, drafters: PlanDrafters, room: int, clock: Clock = time.perf_counter) -> None:
        """drafters: those of the engine. room: positions per row for a prompt and its new tokens."""
        self.engine = engine
        self.drafters = drafters
        self.room = room
        self.clock = clock
        self.times: RoundTimes | None = None
        self.rounds: dict[Plan, Round] = {}
        self.controller: Controller | None = None
        self.behind = False
        """Whether the draft's ring lacks tokens."""

    @property
    def origin(self) -> Origin:
        """Of the tokens that the current plan proposes."""
        assert self.controller is not None
        return "lookup" if self.controller.plan.kind == "lookup" else "draft"

    def prepare(self, stats: GenerationStats) -> None:
        """Capture the rounds, and measure their times unless they are cached, at the first call."""
        if self.times is not None:
            return
        engine = self.engine
        # The largest plan comes first: the others fit into its memory.
        for plan in reversed(self.drafters.plans):
            drafter = self.drafters.drafter(plan)
            rounds = PlanRounds(engine.runner, drafter, engine.sampler, engine.cache, engine.root)
            self.rounds[plan] = playable(rounds, stats)

        start = time.perf_counter()
        shape = self.drafters.tree.shape if self.drafters.tree else ()
        key = cache_key(engine.runner, self.drafters.plans, shape, engine.sampler, len(engine.root), self.room)
        path = cache_file(key)
        self.times = load_times(path, self.drafters.plans)
        if self.times is None:
            self.times = self.measure()
            store_times(path, key, self.times)
        stats.measure_s += time.perf_counter() - start

    def start(self, first_tokens: Sequence[int]) -> None:
        """Begin a generation, after prefill. first_tokens: the first new token of each row."""
        assert self.times is not None
        engine = self.engine
        rows = zip(engine.prompts.tolist(), engine.prompt_lengths, strict=True)
        prompts = [row[:length] for row, length in rows]
        self.controller = Controller(self.drafters.plans, self.times, prompts, first_tokens, self.times.refill)
        self.behind = False

    def play(self, active: Tensor) -> tuple[Tensor, ...]:
        """Play a round; see `PlanRounds.round`."""
        assert self.controller is not None
        plan = self.controller.choose()
        return self.play_plan(plan, active)

    def play_plan(self, plan: Plan, active: Tensor) -> tuple[Tensor, ...]:
        if plan.kind == "tree" and self.behind:
            self.drafters.refill(self.engine.cache.lengths)
        self.behind = plan.kind != "tree"
        return self.rounds[plan](active)

    def observe(self, rows: Sequence[RowRound | None], active: Sequence[bool]) -> None:
        """Report the part of the round in each row, None for inactive ones, and the active rows of the next round."""
        assert self.controller is not None
        self.controller.observe(rows, active)

    def finish(self, stats: GenerationStats) -> None:
        """Report the rounds of each plan."""
        assert self.controller is not None
        stats.rounds_by_plan = {plan.name: rounds for plan, rounds in self.controller.played.items()}

    @torch.no_grad()
    def measure(self) -> RoundTimes:
        """Time the rounds on the empty cache, as if it held tokens. The random generator is left as it was."""
        engine = self.engine
        generator = generator_of(engine)
        state = generator.get_state()
        contexts = (min(LOW_CONTEXT, self.room // 2), self.room)
        seconds: dict[str, tuple[float, float]] = {}
        for plan in self.drafters.plans:
            low, high = (self._median_seconds(plan, context) for context in contexts)
            seconds[plan.name] = (low, high)
        refill = self._median_seconds(None, self.room)
        engine.clear()
        generator.set_state(state)
        return RoundTimes(contexts, seconds, refill)

    def _median_seconds(self, plan: Plan | None, context: int) -> float:
        """The time of a round after `context` tokens, or of a refill of the draft's ring if there is no plan."""
        lengths = self.engine.cache.lengths
        all_rows = torch.ones_like(self.engine.root, dtype=torch.bool)
        seconds = []
        for _ in range(1 + REPLAYS):
            lengths.fill_(context)
            lengths.tolist()  # the device is idle
            start = self.clock()
            if plan is None:
                self.drafters.refill(lengths)
            else:
                self.rounds[plan](all_rows)
            lengths.tolist()  # waits for the round
            seconds.append(self.clock() - start)
        return median(seconds[1:])
