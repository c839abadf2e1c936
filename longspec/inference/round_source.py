"""The source of a generation's rounds: one method here, several plans in `adaptive.auto_rounds`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from longspec.inference.engine.capture import CapturedRound, warm_up
from longspec.inference.engine.engine import Engine
from longspec.inference.engine.round_record import Report, RoundResult, RowRound
from longspec.inference.engine.rounds import Round, Rounds
from longspec.inference.stats import GenerationStats


class RoundSource(Protocol):
    """An engine with its rounds, which several generations use one after another."""

    engine: Engine
    report: Report
    """What the newest round reports."""

    def prepare(self, stats: GenerationStats) -> None:
        """Prepare the rounds on an engine whose cache is empty, and add the times of this to `stats`."""

    def start(self, first_tokens: Sequence[int]) -> None:
        """Begin a generation after prefill. first_tokens: the first new token of each row."""

    def play(self, active: Tensor) -> RoundResult:
        """Play a round. active: bool [B]."""

    def observe(self, rows: Sequence[RowRound | None], active: Sequence[bool]) -> None:
        """Take the round's part in each row, None for inactive ones, and whether each row is active in the next."""

    def finish(self, stats: GenerationStats) -> None:
        """End a generation, and write the source's counts to `stats`."""


class FixedRounds:
    """The rounds of one method."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.report = engine.report
        self.round: Round | None = None

    def prepare(self, stats: GenerationStats) -> None:
        if self.round is None:
            self.round = playable(self.engine, stats)

    def start(self, first_tokens: Sequence[int]) -> None:
        pass

    def play(self, active: Tensor) -> RoundResult:
        assert self.round is not None
        return self.round(active)

    def observe(self, rows: Sequence[RowRound | None], active: Sequence[bool]) -> None:
        pass

    def finish(self, stats: GenerationStats) -> None:
        pass


def playable(rounds: Rounds, stats: GenerationStats) -> Round:
    """`rounds.round`, captured if the runner allows it. The cache must be empty. Adds the times to `stats`."""
    if not rounds.runner.capturable:
        return rounds.round
    start = time.perf_counter()
    warm_up(rounds)
    warm = time.perf_counter()
    captured = CapturedRound(rounds)
    stats.warm_up_s += warm - start
    stats.capture_s += time.perf_counter() - warm
    return captured
