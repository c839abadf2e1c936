"""The measurement: loads the weights, runs the samples batch by batch and times them.

Under torchrun each rank runs a share of the batches. The rows of a batch and their seeds do not depend on the ranks.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

from tqdm import tqdm

from longspec.inference import load_pair
from longspec.inference.generate import generate
from longspec.inference.request import row_seed
from longspec.longbench.plan import Plan
from longspec.longbench.prompts import TaskPrompt
from longspec.longbench.report import Report, table
from longspec.longbench.run_folder import DIGESTS
from longspec.longbench.sample_lines import SampleResult
from longspec.models.glide import GlideMixin
from longspec.ranks.replicas import Replicas
from longspec.signals import StopSignals, exit_code

SAMPLES = "samples"
"""Name of the shared counter of samples that have a line."""
WARM_UP_TOKENS = 16
"""New tokens per row of the warm-up."""


def measure(plan: Plan, report: Report, stop: StopSignals, replicas: Replicas) -> dict[str, Any] | None:
    """Run the samples that have no result line yet, then write and return the summary of all samples.

    Only rank 0 writes and returns it. Raises SystemExit after the running batch if a rank receives a stop signal, and
    after this rank's share if another rank has ended before.
    """
    samples = len(plan.selection.prompts)
    earlier = len(report.done)
    is_lost = False
    if earlier == samples:
        if replicas.rank == 0:
            print(f"{plan.output_dir}: complete already, {samples} of {samples} samples")
    else:
        if earlier and replicas.rank == 0:
            print(f"{plan.output_dir}: continues after {earlier} of {samples} samples")
        model = replicas.together(lambda: load_model(plan))
        is_lost = not run(model, plan, report, stop, replicas)

    stop.at_once = False
    summary = None
    if replicas.rank == 0:
        if not is_lost:
            report.collect(wait=True)
        if len(report.done) == samples:
            summary = report.finish(plan.device, **describe(plan))
            print(table(summary))
            print(f"written to {plan.output_dir}")
    done = replicas.last_count(SAMPLES) if is_lost else len(report.done)
    if is_lost or stop.received is not None:
        if replicas.reports_loss() if is_lost else replicas.rank == 0:
            print(_interruption(plan, done, stop.received), file=sys.stderr, flush=True)
        raise SystemExit(1 if stop.received is None else exit_code(stop.received))
    return summary


def _interruption(plan: Plan, done: int, signal_number: int | None) -> str:
    """A line on a run that ended early. done: number of samples with a line. signal_number: None if a rank ended."""
    cause = "a rank has ended" if signal_number is None else f"stopped by {signal.Signals(signal_number).name}"
    samples = len(plan.selection.prompts)
    line = f"{cause}: {done} of {samples} samples are done, in {plan.output_dir}"
    if done == samples:
        return line
    again = "the same command without --overwrite" if plan.options.overwrite and done else "the same command"
    return f"{line}; {again} continues"


def load_model(plan: Plan) -> GlideMixin:
    """Target and draft on the plan's device. If no draft is used, the model has a fresh one that nothing reads."""
    return load_pair.load_model(plan.pair.target, plan.draft, plan.dtype, plan.device)


def run(model: GlideMixin, plan: Plan, report: Report, stop: StopSignals, replicas: Replicas) -> bool:
    """Run a warm-up, which is not timed, then the samples that have no result line yet, batch by batch.

    Returns once all ranks have finished their shares, or after the running batch once a rank has received a stop
    signal. The result is False if another rank has ended before.
    """
    prompts = plan.selection.prompts
    batches = _missing_batches(plan, report)
    # Every rank computes all shares, so they need not be sent.
    share = replicas.share([_load(plan, batch) for batch in batches])
    _warm_up(model, plan)
    # The earlier results are kept until all ranks are ready.
    replicas.gather(None)
    replicas.from_rank_zero(lambda: report.start(replicas.size))
    stop.at_once = False

    label = f"{plan.options.task}, {plan.options.method}"
    earlier = len(report.done) if replicas.rank == 0 else 0
    replicas.count(SAMPLES, earlier)
    with tqdm(total=len(prompts), initial=earlier, desc=label, unit="sample", disable=replicas.rank > 0) as progress:

        def show(finished: int = 0) -> None:
            progress.update(replicas.count(SAMPLES, finished) - progress.n)

        for batch in (batches[index] for index in share):
            if replicas.stopped(stop):
                break
            rows = prompts[batch.start : batch.stop]
            # Each sample has a seed of its own, so a resumed run draws the same tokens as an uninterrupted one.
            seed = [row_seed(plan.options.seed, index) for index in batch]
            output = generate(model, [prompt.token_ids for prompt in rows], **plan.settings, seed=seed)
            results = []
            for prompt, new_tokens in zip(rows, output.new_tokens, strict=True):
                results.append(_result(prompt, new_tokens.tolist(), plan.tokenizer))
            # Some rows of a batch may have had a line, and these do not count again.
            before = len(report.done)
            report.add(results, output.stats, batch.start)
            show(len(report.done) - before)
        return replicas.meet(stop, show)


def _missing_batches(plan: Plan, report: Report) -> list[range]:
    """The indices of the samples of each batch that has to run."""
    samples = len(plan.selection.prompts)
    size = plan.options.batch_size
    batches = (range(first, min(first + size, samples)) for first in range(0, samples, size))
    return [batch for batch in batches if not report.done.issuperset(batch)]


def _load(plan: Plan, batch: range) -> int:
    """The work of a batch, to be balanced over ranks: the positions of its longest row."""
    return max(len(plan.selection.prompts[index].token_ids) for index in batch) + plan.max_new_tokens


def _warm_up(model: GlideMixin, plan: Plan) -> None:
    """Generate a few tokens with the settings of the run, so that all kernels are compiled."""
    # Without an EOS, so that rounds are reached.
    settings = plan.settings | {"max_new_tokens": min(WARM_UP_TOKENS, plan.max_new_tokens), "eos_token_id": ()}
    # With the longest prompts, because kernels are compiled for sizes.
    by_length = sorted(plan.selection.prompts, key=lambda prompt: len(prompt.token_ids), reverse=True)
    longest = by_length[: plan.options.batch_size]
    generate(model, [prompt.token_ids for prompt in longest], **settings, seed=plan.options.seed)


def _result(prompt: TaskPrompt, token_ids: list[int], tokenizer: Any) -> SampleResult:
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    return SampleResult(prompt.id, len(prompt.token_ids), token_ids, text)


def describe(plan: Plan) -> dict[str, Any]:
    """The summary's facts about the run: method, model, task, and the whole configuration."""
    selection = plan.selection
    options = {name: value for name, value in vars(plan.options).items() if name not in ("defaults", "overwrite")}
    resolved = {
        "target": plan.pair.target,
        "draft": plan.draft,
        "window": plan.max_positions,
        "chat_format": plan.chat_format,
        "dtype": str(plan.dtype).removeprefix("torch."),
        "device": str(plan.device),
        "output_dir": str(plan.output_dir),
        "digests": {name: plan.configuration[name] for name in DIGESTS},
    }
    return {
        "method": plan.options.method,
        "model": plan.pair.name,
        "task": plan.options.task,
        "left_out": {
            "too_short": selection.too_short,
            "too_long": selection.too_long,
            "not_reached": selection.not_reached,
        },
        "config": options | plan.settings | resolved,
    }
