"""The measurement of round times, on an empty cache that is made to look as if it held tokens."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from functools import partial
from statistics import median

import torch

from longspec.first_use import announce_first_use
from longspec.inference.adaptive.plans import Plan
from longspec.inference.adaptive.time_cache import RoundTimes
from longspec.inference.engine.rounds import Round, Rounds

REPLAYS = 3
"""Times that are taken of each plan at each of two contexts, after a round that is not timed. The median counts."""
LAUNCHES = 3
"""Rounds per time where rounds are launched ahead: the device does not wait for the host between them."""
LOW_CONTEXT = 64
"""Prefix slots per row of the shorter context, at most half of the longer one."""


@torch.no_grad()
def measure_times(state: Rounds, rounds: Mapping[Plan, Round], refill: Callable[[], None], room: int) -> RoundTimes:
    """Time the rounds of each plan at a short context and at `room` prefix slots per row.

    state: the tensors that the rounds work on. Its cache is empty before and after.
    """
    announce_first_use()
    lengths = state.cache.lengths
    all_rows = torch.ones_like(state.root, dtype=torch.bool)

    def seconds(action: Callable[[], object], context: int, launches: int) -> float:
        lengths.tolist()  # the device is idle
        start = time.perf_counter()
        for _ in range(launches):
            # The content of the cache does not matter: a round on zeros takes as long.
            lengths.fill_(context)
            action()
        lengths.tolist()  # waits for the rounds
        return (time.perf_counter() - start) / launches

    def usual_seconds(action: Callable[[], object], context: int) -> float:
        seconds(action, context, 1)
        launches = LAUNCHES if state.runner.capturable else 1
        return median(seconds(action, context, launches) for _ in range(REPLAYS))

    contexts = (min(LOW_CONTEXT, room // 2), room)
    by_plan = {}
    for plan, play_round in rounds.items():
        low, high = (usual_seconds(partial(play_round, all_rows), context) for context in contexts)
        by_plan[plan.name] = (low, high)
    refill_seconds = usual_seconds(refill, room)
    for tensor in (state.root, lengths, state.cache.faults, state.cache.newest_hidden):
        tensor.zero_()
    return RoundTimes(contexts, by_plan, refill_seconds)
