"""The key of everything that the kernels of a batch's rounds depend on.

Whatever outlives a round by its kernels is found by this key: compiled kernels, engines with captured rounds, and
measured times.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple

from longspec.inference.engine.round_record import PLAIN, Report
from longspec.inference.runner import Runner
from longspec.inference.sampling import SamplingKind

CAPACITY_STEP = 256
"""The number of cache slots per row is a multiple of this."""
MOST_SIZE_CLASSES = 128
"""From this number of steps on, the cache size does not change which kernels run, because splits are bounded."""


class KernelKey(NamedTuple):
    runner: Hashable
    """`Runner.kind`."""
    drafting: Hashable
    """The drafter's `kind`, or the settings that it is made from."""
    sampling: SamplingKind
    rows: int
    """Rows of a round."""
    all_rows: int
    """Rows of the cache: compaction runs over all of it."""
    size_class: int
    """Slots per row in steps of CAPACITY_STEP."""
    report: Report


def kernel_key(
    runner: Runner,
    drafting: Hashable,
    sampling: SamplingKind,
    rows: int,
    slots: int,
    all_rows: int | None = None,
    report: Report = PLAIN,
) -> KernelKey:
    """all_rows: None for as many as in a round. slots: per row."""
    size_class = min(slots // CAPACITY_STEP, MOST_SIZE_CLASSES)
    return KernelKey(runner.kind, drafting, sampling, rows, all_rows or rows, size_class, report)
