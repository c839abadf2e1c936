"""A rank's part of `longspec generate`: the answers that it writes, and the one output file."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from longspec.cli.batches import PROMPTS, Job, Share, answer_prompts, summarize
from longspec.cli.results import Results, open_part_results
from longspec.errors import UserError
from longspec.ranks.replicas import Replicas
from longspec.signals import StopSignals, exit_code


def answer_together(
    job: Job,
    output: Path | None,
    first: Sequence[Results],
    overwrite: bool,
    stop: StopSignals,
    replicas: Replicas,
    report: Callable[[dict[str, Any]], object],
) -> None:
    """Answer the prompts on all ranks, and leave all lines in the output.

    output: None is stdout, for a single process. first: the results on rank 0, nothing on other ranks. report: called
    with the summary on rank 0. Raises UserError, and SystemExit after a stop signal or the end of another rank.
    """

    def resume() -> tuple[str, set[int]]:
        first[0].resume(job.run, overwrite)
        return job.run, first[0].done

    run, done = replicas.from_rank_zero(resume)
    if output is not None:
        replicas.check_shared(output.absolute().parent)
    with ExitStack() as stack:

        def open_part() -> Results:
            if output is None or job.run != run:
                raise UserError("the pair differs from that of rank 0; all hosts must have the same files")
            return stack.enter_context(open_part_results(output, replicas.rank, job.prompts, run, done))

        results = replicas.together(lambda: first[0] if first else open_part())
        stop.at_once = False
        share = answer_prompts(job, results, stop, replicas)

    if share is None:
        if replicas.reports_loss():
            _report_end(job, replicas.last_count(PROMPTS), output, stop)
        raise SystemExit(1 if stop.received is None else exit_code(stop.received))
    shares: list[Share] = replicas.gather(share)
    if replicas.rank == 0:
        if output is not None:
            results.collect(wait=True)
            results.finish()
        report(summarize(job, len(results.done), shares))
        if stop.received is not None:
            _report_end(job, len(results.done), output, stop)
    if stop.received is not None:
        raise SystemExit(exit_code(stop.received))


def _report_end(job: Job, done: int, output: Path | None, stop: StopSignals) -> None:
    """A line on a run that ended early. done: number of prompts with a line."""
    cause = "a rank has ended" if stop.received is None else f"stopped by {signal.Signals(stop.received).name}"
    again = "" if output is None else "; the same command continues"
    print(f"{cause} after {done} of {len(job.prompts)} prompts{again}", file=sys.stderr, flush=True)
