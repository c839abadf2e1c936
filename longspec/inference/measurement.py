"""The measurement of `inference_long-bench.py`: weights are loaded, samples run batch by batch and are timed."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm

from longspec.inference.generate import generate
from longspec.inference.plan import Plan
from longspec.inference.report import Report, SampleResult, table
from longspec.inference.run_folder import CONTENTS
from longspec.inference.tasks import Sample
from longspec.models.draft_files import draft_settings
from longspec.models.families import family_class
from longspec.models.glide import GlideMixin
from longspec.signals import StopSignals, exit_code

WARM_UP_TOKENS = 16


def measure(plan: Plan, report: Report, stop: StopSignals) -> dict[str, Any]:
    """Run the samples that have no line yet, and sum up all of them.

    Raises SystemExit after the running batch if `stop` receives a signal.
    """
    samples, earlier = len(plan.selection.samples), len(report.lines)
    if earlier == samples:
        print(f"{plan.output_dir}: complete already, {samples} of {samples} samples")
    else:
        if earlier:
            print(f"{plan.output_dir}: continues after {earlier} of {samples} samples")
        model = load_model(plan)
        report.begin({"run": plan.run, "target": plan.pair.target, "draft": plan.draft, "data": str(plan.data_file)})
        run(model, plan, report, stop)
    stop.at_once = False
    if len(report.lines) == samples:
        summary = report.finish(plan.device, **describe(plan))
        print(table(summary))
        print(f"written to {plan.output_dir}")
    if stop.received is not None:
        print(_interruption(plan, len(report.lines), stop.received), file=sys.stderr)
        raise SystemExit(exit_code(stop.received))
    return summary


def _interruption(plan: Plan, done: int, signal_number: int) -> str:
    name, samples = signal.Signals(signal_number).name, len(plan.selection.samples)
    again = "the same command without --overwrite" if plan.options.overwrite else "the same command"
    line = f"stopped by {name}: {done} of {samples} samples are done, in {plan.output_dir}"
    return line if done == samples else f"{line}; {again} continues"


def load_model(plan: Plan) -> GlideMixin:
    """Target and draft on the plan's device; without a draft in use, a fresh one that nothing reads."""
    model_class = family_class(plan.config, plan.pair.target)
    model = model_class.from_pretrained(
        plan.pair.target,
        state_dict=plan.draft_state,
        torch_dtype=plan.dtype,
        **(asdict(draft_settings(plan.draft).options) if plan.draft else {}),
    )
    return model.to(plan.device).eval()  # type: ignore[arg-type]


def run(model: GlideMixin, plan: Plan, report: Report, stop: StopSignals) -> None:
    """One untimed warm-up with the run's own settings, then batch by batch the samples that have no line yet.

    Returns after the running batch once `stop` has received a signal.
    """
    samples, size = plan.selection.samples, plan.options.batch_size
    # Without an end of sequence, so that the warm-up comes to its rounds.
    warm_up = plan.settings | {"max_new_tokens": min(WARM_UP_TOKENS, plan.max_new_tokens), "eos_token_id": ()}
    # The longest prompts, because kernels are compiled for sizes.
    longest = sorted(samples, key=lambda sample: len(sample.token_ids), reverse=True)[:size]
    generate(model, *_padded(longest), **warm_up, seed=plan.options.seed)
    stop.at_once = False
    label = f"{plan.options.task}, {plan.options.method}"
    with tqdm(total=len(samples), initial=len(report.lines), desc=label, unit="sample") as progress:
        for number, first in enumerate(range(0, len(samples), size)):
            batch = samples[first : first + size]
            if report.done.issuperset(range(first, first + len(batch))):
                continue
            if stop.received is not None:
                return
            # A batch's seed does not depend on the batches before it, so an interrupted run continues as it would have.
            output = generate(model, *_padded(batch), **plan.settings, seed=plan.options.seed + number)
            answers = [tokens.tolist() for tokens in output.new_tokens]
            results = [_result(*pair, plan.tokenizer) for pair in zip(batch, answers, strict=True)]
            report.add(results, output.stats, first)
            progress.update(len(report.lines) - progress.n)


def _padded(batch: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """input_ids and attention_mask, LongTensor [B, longest], padded right."""
    rows = [torch.tensor(sample.token_ids) for sample in batch]
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True), pad([torch.ones_like(row) for row in rows], batch_first=True)


def _result(sample: Sample, token_ids: list[int], tokenizer: Any) -> SampleResult:
    text = tokenizer.decode(token_ids, skip_special_tokens=True)
    return SampleResult(sample.id, len(sample.token_ids), token_ids, text)


def describe(plan: Plan) -> dict[str, Any]:
    """The summary's facts about the run: what ran, on what, and the whole configuration."""
    selection = plan.selection
    return {
        "method": plan.options.method,
        "model": plan.pair.name,
        "task": plan.options.task,
        "left_out": {
            "too_short": selection.too_short,
            "too_long": selection.too_long,
            "not_reached": selection.not_reached,
        },
        "config": {name: value for name, value in vars(plan.options).items() if name not in ("defaults", "overwrite")}
        | plan.settings
        | {
            "target": plan.pair.target,
            "draft": plan.draft,
            "window": plan.window,
            "chat_format": plan.chat_format,
            "dtype": str(plan.dtype).removeprefix("torch."),
            "device": str(plan.device),
            "output_dir": str(plan.output_dir),
            "digests": {name: plan.run[name] for name in CONTENTS},
        },
    }
