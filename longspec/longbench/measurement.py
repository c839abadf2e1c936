"""The measurement: loads the weights, runs the samples batch by batch and times them."""

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
from longspec.longbench.plan import Plan
from longspec.longbench.prompts import TaskPrompt
from longspec.longbench.report import Report, SampleResult, table
from longspec.longbench.run_folder import DIGESTS
from longspec.models.draft_files import draft_settings
from longspec.models.families import family_class
from longspec.models.glide import GlideMixin
from longspec.signals import StopSignals, exit_code

WARM_UP_TOKENS = 16
"""New tokens per row of the warm-up."""


def measure(plan: Plan, report: Report, stop: StopSignals) -> dict[str, Any]:
    """Run the samples that have no result line yet, then write and return the summary of all samples.

    Raises SystemExit after the running batch if `stop` receives a signal.
    """
    samples = len(plan.selection.prompts)
    earlier = len(report.lines)
    if earlier == samples:
        print(f"{plan.output_dir}: complete already, {samples} of {samples} samples")
    else:
        if earlier:
            print(f"{plan.output_dir}: continues after {earlier} of {samples} samples")
        model = load_model(plan)
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
    """A line on a stopped run. done: number of samples with a line."""
    name = signal.Signals(signal_number).name
    samples = len(plan.selection.prompts)
    line = f"stopped by {name}: {done} of {samples} samples are done, in {plan.output_dir}"
    if done == samples:
        return line
    again = "the same command without --overwrite" if plan.options.overwrite and done else "the same command"
    return f"{line}; {again} continues"


def load_model(plan: Plan) -> GlideMixin:
    """Target and draft on the plan's device. If no draft is used, the model has a fresh one that nothing reads."""
    # The plan read the draft already, so its file is not opened again.
    model_class = family_class(plan.config, plan.pair.target)
    draft_options = asdict(draft_settings(plan.draft).options) if plan.draft else {}
    model = model_class.from_pretrained(
        plan.pair.target, state_dict=plan.draft_state, torch_dtype=plan.dtype, **draft_options
    )
    # Moved as a whole: target and draft share a device.
    return model.to(plan.device).eval()  # type: ignore[arg-type]


def run(model: GlideMixin, plan: Plan, report: Report, stop: StopSignals) -> None:
    """Run a warm-up, which is not timed, then the samples that have no result line yet, batch by batch.

    Returns after the running batch once `stop` has received a signal.
    """
    prompts = plan.selection.prompts
    batch_size = plan.options.batch_size
    _warm_up(model, plan)
    stop.at_once = False
    label = f"{plan.options.task}, {plan.options.method}"
    with tqdm(total=len(prompts), initial=len(report.lines), desc=label, unit="sample") as progress:
        for number, first in enumerate(range(0, len(prompts), batch_size)):
            batch = prompts[first : first + batch_size]
            # A batch of which one line is missing runs again as a whole, with the same seed.
            if report.done.issuperset(range(first, first + len(batch))):
                continue
            if stop.received is not None:
                return
            # The seed depends only on the batch, so a resumed run draws the same tokens as an uninterrupted one.
            output = generate(model, *_padded(batch), **plan.settings, seed=plan.options.seed + number)
            results = []
            for prompt, new_tokens in zip(batch, output.new_tokens, strict=True):
                results.append(_result(prompt, new_tokens.tolist(), plan.tokenizer))
            report.add(results, output.stats, first)
            progress.update(len(report.lines) - progress.n)


def _warm_up(model: GlideMixin, plan: Plan) -> None:
    """Generate a few tokens with the settings of the run, so that all kernels are compiled."""
    # Without an EOS, so that rounds are reached.
    settings = plan.settings | {"max_new_tokens": min(WARM_UP_TOKENS, plan.max_new_tokens), "eos_token_id": ()}
    # With the longest prompts, because kernels are compiled for sizes.
    by_length = sorted(plan.selection.prompts, key=lambda prompt: len(prompt.token_ids), reverse=True)
    longest = by_length[: plan.options.batch_size]
    generate(model, *_padded(longest), **settings, seed=plan.options.seed)


def _padded(batch: Sequence[TaskPrompt]) -> tuple[Tensor, Tensor]:
    """input_ids and attention_mask, LongTensor [B, longest] each, padded on the right."""
    rows = [torch.tensor(prompt.token_ids) for prompt in batch]
    masks = [torch.ones_like(row) for row in rows]

    # The padding's token is masked, so any id will do.
    pad = torch.nn.utils.rnn.pad_sequence
    return pad(rows, batch_first=True), pad(masks, batch_first=True)


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
