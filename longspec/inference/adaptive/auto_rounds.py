"""Rounds of method "auto" on one engine: a round per plan, their measured times, and the controller that chooses."""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from longspec.inference.adaptive.controller import Controller
from longspec.inference.adaptive.measurement import measure_times
from longspec.inference.adaptive.plan_drafters import PlanDrafters
from longspec.inference.adaptive.plans import Plan
from longspec.inference.adaptive.time_cache import RoundTimes, cache_key, known_times
from longspec.inference.engine.engine import Engine
from longspec.inference.engine.round_record import PLAIN, Report, RoundResult, RowRound
from longspec.inference.engine.rounds import Round, Rounds
from longspec.inference.round_source import playable
from longspec.inference.stats import GenerationStats


class AutoRounds:
    """Plays the plan that a controller chooses before each round."""

    def __init__(self, engine: Engine, drafters: PlanDrafters, room: int) -> None:
        """drafters: the engine's drafters. room: positions per row for a prompt and its new tokens."""
        self.engine = engine
        self.drafters = drafters
        self.room = room
        self.times: RoundTimes | None = None
        self.rounds: dict[Plan, Round] = {}
        self.controller: Controller | None = None
        self.report = PLAIN
        self.ring_is_stale = False
        """Whether the draft's ring lacks tokens."""

    def prepare(self, stats: GenerationStats) -> None:
        """Capture the rounds, and measure their times unless they are cached, at the first call."""
        if self.times is not None:
            return
        engine = self.engine
        # The largest plan comes first: the others fit into its memory.
        for plan in reversed(self.drafters.plans):
            drafter, report = self.drafters.for_plan(plan), Report(ranks=plan.kind == "tree")
            rounds = Rounds(engine.runner, drafter, engine.sampler, engine.cache, engine.root, report)
            self.rounds[plan] = playable(rounds, stats)

        start = time.perf_counter()
        key = cache_key(engine.kind, self.drafters.plans, engine.runner.config, self.room)
        self.times = known_times(key, self.drafters.plans, self.measure)
        stats.measure_s += time.perf_counter() - start

    def start(self, first_tokens: Sequence[int]) -> None:
        """Begin a generation, after prefill. first_tokens: the first new token of each row."""
        assert self.times is not None
        engine = self.engine
        times, batch = self.times, len(first_tokens)
        # A round computes all rows, but only active ones read their prefix.
        self.controller = Controller(self.drafters.plans, lambda plan, read: times(plan, read / batch), times.refill)
        prompts = engine.prompts.numpy(force=True)
        for row, (length, token) in enumerate(zip(engine.prompt_lengths, first_tokens, strict=True)):
            trace = self.controller.new_trace()
            trace.read(prompts[row][:length])
            self.controller.start(row, trace, token)
        self.ring_is_stale = False

    def play(self, active: Tensor) -> RoundResult:
        """Play a round; see `Rounds.round`."""
        assert self.controller is not None
        result = self.play_plan(self.controller.choose(), active)
        self.controller.think()  # while the device plays
        return result

    def play_plan(self, plan: Plan, active: Tensor) -> RoundResult:
        if plan.feeds_draft and self.ring_is_stale:
            self.drafters.refill(self.engine.cache.lengths)
        self.ring_is_stale = not plan.feeds_draft
        self.report = Report(ranks=plan.kind == "tree")
        return self.rounds[plan](active)

    def observe(self, rows: Sequence[RowRound | None], active: Sequence[bool]) -> None:
        """Report the part of the round in each row, None for inactive ones, and the active rows of the next round."""
        assert self.controller is not None
        self.controller.observe({row: part for row, part in enumerate(rows) if part is not None})
        for row, is_active in enumerate(active):
            if not is_active:
                self.controller.end(row)

    def finish(self, stats: GenerationStats) -> None:
        """Report the rounds of each plan."""
        assert self.controller is not None
        stats.rounds_by_plan = {plan.name: rounds for plan, rounds in self.controller.played.items()}

    def measure(self) -> RoundTimes:
        """Time the rounds."""
        lengths = self.engine.cache.lengths
        return measure_times(self.engine, self.rounds, lambda: self.drafters.refill(lengths), self.room)
