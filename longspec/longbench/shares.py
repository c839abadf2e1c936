"""A rank's part of a run: the plan that all ranks agree on, and the report that the rank writes to."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from typing import Any

from longspec.errors import UserError
from longspec.longbench.measurement import measure
from longspec.longbench.plan import Plan, make_plan
from longspec.longbench.report import Report
from longspec.longbench.run_folder import differences, open_part_report, open_report
from longspec.ranks.replicas import Replicas
from longspec.signals import StopSignals


def measure_share(options: argparse.Namespace, stop: StopSignals, replicas: Replicas) -> dict[str, Any] | None:
    """Check the run, measure this rank's share of it, and return the summary on rank 0. Raises UserError.

    Rank 0 checks first, locks the output folder, and reports errors. The other ranks follow it.
    """
    options.device = replicas.device(options.device)
    plan = replicas.rank_zero_first(lambda: make_plan(options))
    if replicas.rank == 0:
        for note in plan.notes:
            print(note)
    with ExitStack() as stack:
        report = _open(plan, stack, replicas)
        return measure(plan, report, stop, replicas)


def _open(plan: Plan, stack: ExitStack, replicas: Replicas) -> Report:
    """The report of this rank. Its files are locked until `stack` ends."""
    reports: list[Report] = []

    def open_first() -> tuple[dict[str, Any], set[int]]:
        reports.append(stack.enter_context(open_report(plan.output_dir, plan.record, plan.options.overwrite)))
        return plan.configuration, reports[0].done

    # Part files take up only samples that the file of results lacks.
    configuration, done = replicas.from_rank_zero(open_first)
    replicas.check_shared(plan.output_dir)

    def open_other() -> Report:
        # A copy of the data or the draft on another host may be older.
        if differing := differences(configuration, plan.configuration):
            raise UserError(f"the run differs from that of rank 0 ({differing}); all hosts must have the same inputs")
        return stack.enter_context(open_part_report(plan.output_dir, replicas.rank, done))

    return replicas.together(lambda: reports[0] if reports else open_other())
