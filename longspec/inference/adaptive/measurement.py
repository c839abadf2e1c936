"""The measurement of round times, on an empty cache that is made to look as if it held tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import torch

from longspec.inference.adaptive.plans import Plan
from longspec.inference.adaptive.time_cache import RoundTimes
from longspec.inference.engine import Round, Rounds

REPLAYS = 3
"""Rounds of each plan that are timed at each of two contexts, after one that is not."""
LOW_CONTEXT = 64
"""Prefix slots per row of the shorter context, at most half of the longer one."""

Clock = Callable[[], float]
"""Returns the time in seconds."""


@torch.no_grad()
def measure_times(
    state: Rounds, rounds: Mapping[Plan, Round], refill: Callable[[], None], room: int, clock: Clock = time.perf_counter
) -> RoundTimes:
    """Time the rounds of each plan at a short context and at `room` prefix slots per row.

    state: the tensors that the rounds work on. Its cache is empty before and after.
    """
    lengths = state.cache.lengths
    all_rows = torch.ones_like(state.root, dtype=torch.bool)

    def seconds(action: Callable[[], object], context: int) -> float:
        times = []
        for _ in range(1 + REPLAYS):
            # The content of the cache does not matter: a round on zeros takes as long.
            lengths.fill_(context)
            lengths.tolist()  # the device is idle
            start = clock()
            action()
            lengths.tolist()  # waits for the round
            times.append(clock() - start)
        return median(times[1:])

    contexts = (min(LOW_CONTEXT, room // 2), room)
    by_plan = {}
    for plan, play_round in rounds.items():
        low, high = (seconds(partial(play_round, all_rows), context) for context in contexts)
        by_plan[plan.name] = (low, high)
    refill_seconds = seconds(refill, room)
    for tensor in (state.root, lengths, state.cache.faults, state.cache.newest_hidden):
        tensor.zero_()
    return RoundTimes(contexts, by_plan, refill_seconds)
