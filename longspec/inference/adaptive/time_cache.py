"""The times of rounds: measured on an empty cache that looks as if it held tokens, and kept in one JSON file per
key."""

import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import PreTrainedConfig

from longspec.inference.adaptive.plans import Plan
from longspec.inference.engine.rounds import KernelKey, Round, Rounds
from longspec.inference.process_group import same_on_all_ranks
from longspec.models.parallel import model_parallel_rank_and_size
from longspec.replacing import replacing
from longspec.user_cache import announce_first_use, user_cache

logger = logging.getLogger(__name__)

FORMAT = 10
"""Version of the cache's files. It also grows when rounds become faster or slower."""
LIFETIME_S = 30 * 24 * 3600
"""Seconds after which times are measured again: drivers, clocks and other software change."""
BUSY_LIFETIME_S = 600
"""The same for times that were measured while other processes used all cores."""
REPLAYS = 3
"""Times that are taken of each plan at each of two contexts, after a round that is not timed. The median counts."""
LAUNCHES = 3
"""Rounds per time where rounds are launched ahead: the device does not wait for the host between them."""
LOW_CONTEXT = 64
"""Prefix slots per row of the shorter context, at most half of the longer one."""


@dataclass
class RoundTimes:
    """Times of the rounds of each plan, in seconds."""

    contexts: tuple[int, int]
    """The two numbers of prefix slots per row at which rounds were measured."""
    seconds: dict[str, tuple[float, float]]
    """The time of a round at both contexts, by the name of the plan."""
    refill: float
    """Time to fill the draft's window with the newest tokens."""

    def __call__(self, plan: Plan, context: float) -> float:
        """The time of a round at a mean number of prefix slots per row. It is linear in the context."""
        low, high = self.contexts
        at_low, at_high = self.seconds[plan.name]
        # A round is never faster on a longer prefix; noise can say so.
        return at_low + max(at_high - at_low, 0.0) * max(context - low, 0.0) / (high - low)


class BatchTimes:
    """Times of the rounds of a batch, by the number of rows that they run over."""

    def __init__(self) -> None:
        self.by_size: dict[int, RoundTimes] = {}
        """At the smallest and the largest measured number of rows."""
        self.size = 1
        """Rows of the next round."""

    def __call__(self, plan: Plan, read: int) -> float:
        """The time of the next round if it reads `read` prefix slots in total, in seconds."""
        # Linear in the number of rows between the two sizes that were measured.
        low, high = min(self.by_size), max(self.by_size)
        at_low = self.by_size[low](plan, read / self.size)
        if low == high:
            return at_low
        at_high = self.by_size[high](plan, read / self.size)
        return at_low + max(at_high - at_low, 0.0) * (self.size - low) / (high - low)

    def refill(self) -> float:
        """Time to fill the draft's window of the smallest measured number of rows."""
        return self.by_size[min(self.by_size)].refill


def cache_key(kernels: KernelKey, plans: Sequence[Plan], config: PreTrainedConfig, room: int) -> dict[str, Any]:
    """Everything that the times depend on; the numbers of rows and positions are rounded up to powers of two. kernels:
    those of the rounds, whatever the plan. config: the target's."""
    # The weights do not matter: a round of any draft of this architecture takes as long.
    # The same target under another path or another version of transformers has the same times.
    unrelated = ("_name_or_path", "transformers_version", "architectures")
    target = {name: value for name, value in config.to_dict().items() if name not in unrelated}
    rows, all_rows, room = (1 << (number - 1).bit_length() for number in (kernels.rows, kernels.all_rows, room))
    return {
        "target": _digest(target),
        "plans": [plan.name for plan in plans],
        "kernels": kernels._replace(drafting=str(kernels.drafting), rows=rows, all_rows=all_rows, size_class=room),
        "format": FORMAT,
    }


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def known_times(key: dict[str, Any], measure: Callable[[], RoundTimes]) -> RoundTimes:
    """The times in the cache, or those that `measure` returns, which are then stored. Ranks that share a target measure
    together and take rank 0's times, so that all choose the same plans."""
    path = user_cache("round_times") / f"{_digest(key)}.json"
    if (times := same_on_all_ranks(lambda: load_times(path))) is None:
        measured = measure()
        times = same_on_all_ranks(lambda: measured)
        if model_parallel_rank_and_size()[0] == 0:
            store_times(path, key, times)
    return times


def load_times(path: Path) -> RoundTimes | None:
    """The times in a file of the cache; None if it is missing, too old or unreadable."""
    with suppress(OSError, ValueError, TypeError, LookupError):
        content = json.loads(path.read_text())
        if time.time() < content["expires"]:
            return RoundTimes(**content["times"])
    return None


def store_times(path: Path, key: dict[str, Any], times: RoundTimes) -> None:
    """Write a file of the cache atomically. On failure a warning is logged, and each process measures again."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # This process has a thread per core itself.
        is_busy = os.getloadavg()[0] > len(os.sched_getaffinity(0)) + 1
        lifetime_s = BUSY_LIFETIME_S if is_busy else LIFETIME_S
        content = {"key": key, "times": asdict(times), "expires": time.time() + lifetime_s}
        with replacing(path) as unfinished:
            unfinished.write_text(json.dumps(content, indent=2) + "\n")
    except OSError as error:
        logger.warning("%s: the times of rounds are not kept (%s)", path, error)


def forget_times() -> None:
    """Remove all times from the cache, so that they are measured again."""
    shutil.rmtree(user_cache("round_times"), ignore_errors=True)


@torch.no_grad()
def measure_times(state: Rounds, rounds: Mapping[Plan, Round], refill: Callable[[], None], room: int) -> RoundTimes:
    """Time the rounds of each plan on `state`, whose cache is empty, at a short context and at `room` slots per row."""
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
