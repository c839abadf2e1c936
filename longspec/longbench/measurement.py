"""The measurement: loads the weights, and runs and times the samples, of which each rank of torchrun has a share."""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

from longspec.command_line import drafting_of
from longspec.inference.answering import answer_all, whole_answers
from longspec.inference.arguments import checked_drafting, end_tokens
from longspec.inference.generate import generate, make_requests
from longspec.inference.load_pair import load_model
from longspec.inference.request import row_seed
from longspec.inference.stats import GenerationStats
from longspec.jobs.job import DIGESTS, Count, ResumableJob, open_results
from longspec.jobs.results import Results
from longspec.longbench.plan import EvaluationPlan, make_plan
from longspec.longbench.report import read_line, sample_line, summarize, table, write_json
from longspec.longbench.run_folder import SAMPLES_NAME, SUMMARY_NAME, open_run, start_run
from longspec.models.glide import GlideMixin
from longspec.ranks.replicas import Replicas
from longspec.signals import StopSignals

WARM_UP_TOKENS = 16


def measure(options: argparse.Namespace, stop: StopSignals, replicas: Replicas) -> dict[str, Any] | None:
    """Check a run, and measure this rank's share of the samples without a line. Returns the summary on rank 0.

    Rank 0 checks first, locks the output folder, and reports errors. Raises UserError, and SystemExit after the running
    batch if a rank receives a stop signal, or after this rank's share if another rank has ended before.
    """
    options.device = replicas.device(options.device)
    plan = replicas.rank_zero_first(lambda: make_plan(options))
    if replicas.rank == 0:
        for note in plan.notes:
            print(note)
    job = ResumableJob(
        len(plan.selection.prompts), "sample", plan.output_dir, stop, replicas, overwrites=options.overwrite
    )
    record = {**plan.record, "processes": 1}
    summary = None
    with ExitStack() as stack:
        results = open_results(
            lambda: stack.enter_context(open_run(plan.output_dir, record, options.overwrite)),
            plan.configuration,
            plan.output_dir / SAMPLES_NAME,
            read_line,
            replicas,
        )
        if len(results.done) < job.total:
            _measure_missing(plan, results, record, job)
        elif replicas.rank == 0:
            print(f"{plan.output_dir}: complete already, {job.total} of {job.total} samples")
        stop.at_once = False
        if replicas.rank == 0:
            results.put_in_order()
            if len(results.done) == job.total:
                summary = _finish(plan, results, record["processes"])
        job.end(len(results.done))
    return summary


def _measure_missing(plan: EvaluationPlan, results: Results, record: dict[str, Any], job: ResumableJob) -> None:
    """Load the model and run this rank's share of the samples without a line."""
    replicas = job.replicas
    if results.done and replicas.rank == 0:
        print(f"{plan.output_dir}: continues after {len(results.done)} of {job.total} samples")
    # If no draft is used, the model has a fresh one that nothing reads.
    model = replicas.together(lambda: load_model(plan.pair.target, plan.draft, plan.dtype, plan.device))
    _warm_up(model, plan)
    # The earlier results are kept until all ranks are ready.
    replicas.gather(None)
    record["processes"] = max(record["processes"], replicas.size)
    replicas.rank_zero_first(lambda: start_run(results, record if replicas.rank == 0 else None))
    job.stop.at_once = False
    run(model, plan, results, job)


def _finish(plan: EvaluationPlan, results: Results, processes: int) -> dict[str, Any]:
    """Write, print and return the summary of a complete run."""
    summary = summarize(results.lines, processes, plan.device, describe(plan))
    write_json(plan.output_dir / SUMMARY_NAME, summary)
    print(table(summary))
    print(f"written to {plan.output_dir}")
    return summary


def run(model: GlideMixin, plan: EvaluationPlan, results: Results, job: ResumableJob) -> None:
    """Run this rank's share of the samples without a line."""
    prompts, rows = plan.selection.prompts, plan.options.batch_size

    def add(index: int, token_ids: list[int], stats: GenerationStats, count: Count) -> None:
        text = plan.tokenizer.decode(token_ids, skip_special_tokens=True)
        results.add(sample_line(prompts[index], token_ids, text, stats, index, rows))
        count(1)

    # Each sample has a seed of its own, so a resumed run draws the same tokens as an uninterrupted one.
    def work_one_by_one(own: Iterator[int], count: Count) -> None:
        for index in own:
            seed = [row_seed(plan.options.seed, index)]
            output = generate(model, [prompts[index].token_ids], **plan.settings, seed=seed)
            add(index, output.new_tokens[0].tolist(), output.stats, count)

    def work_together(own: Iterator[int], count: Count) -> None:
        indices = list(own)
        listener = whole_answers(
            lambda number, token_ids, stats: add(indices[number], token_ids, stats, count), job.is_stopped
        )
        options, eos_ids = plan.options, end_tokens(model, plan.pair.eos_token_id)
        ids = [prompts[index].token_ids for index in indices]
        seeds = [row_seed(options.seed, index) for index in indices]
        shape = plan.max_new_tokens, options.temperature, options.top_p, options.top_k
        requests = make_requests(model, ids, seeds, plan.token_options, eos_ids, *shape)
        drafting = checked_drafting(model, drafting_of(options), False)
        answer_all(model, drafting, requests, rows, listener, options.attention, options.compile)

    missing = [index for index in range(len(prompts)) if index not in results.done]
    work = work_one_by_one if rows == 1 else work_together
    label = f"{plan.options.task}, {plan.options.method}"
    job.run(missing, lambda index: len(prompts[index].token_ids) + plan.max_new_tokens, work, len(results.done), label)


def _warm_up(model: GlideMixin, plan: EvaluationPlan) -> None:
    """Generate a few tokens with the settings of the run, so that all kernels are compiled."""
    # Without an EOS, so that rounds are reached.
    settings = plan.settings | {"max_new_tokens": min(WARM_UP_TOKENS, plan.max_new_tokens), "eos_token_id": ()}
    # With the longest prompts, because kernels are compiled for sizes.
    by_length = sorted(plan.selection.prompts, key=lambda prompt: len(prompt.token_ids), reverse=True)
    rows = plan.options.batch_size
    ids = [prompt.token_ids for prompt in by_length[:rows]]
    generate(model, ids, **settings, seed=plan.options.seed, batch_size=None if rows == 1 else rows)


def describe(plan: EvaluationPlan) -> dict[str, Any]:
    """The summary's facts about the run: method, model, task, and the whole configuration."""
    selection = plan.selection
    options = {name: value for name, value in vars(plan.options).items() if name != "overwrite"}
    resolved = {
        "target": plan.pair.target,
        "draft": plan.draft,
        "window": plan.max_positions,
        "chat_format": plan.chat_format,
        "dtype": plan.configuration["dtype"],
        "device": str(plan.device),
        "output_dir": str(plan.output_dir),
        "digests": {name: plan.configuration[name] for name in DIGESTS if name in plan.configuration},
    }
    return {
        "method": plan.options.method,
        "model": plan.pair.name,
        "task": plan.options.task,
        "left_out": {name: getattr(selection, name) for name in ("too_short", "too_long")},
        "config": options | plan.settings | resolved,
    }
