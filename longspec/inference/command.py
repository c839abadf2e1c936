"""The command `inference_long-bench.py`: options and data are checked first, then weights are loaded and timed."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from tqdm import tqdm

from longspec.data.target_format import AUTO as AUTO_FORMAT
from longspec.data.target_format import CHAT_FORMAT_CHOICES
from longspec.errors import UserError, reports_user_errors
from longspec.inference.generate import generate
from longspec.inference.methods import METHODS, TREE_RULES
from longspec.inference.plan import Plan, make_plan
from longspec.inference.registry import PAIRS
from longspec.inference.report import Report, SampleResult, table
from longspec.inference.run_folder import CONTENTS, open_report
from longspec.inference.tasks import HEADROOM, MIN_PROMPT_LEN, TASKS, Sample
from longspec.inference.tree_shapes import AUTO, DEFAULT_SHAPE
from longspec.kernels.attention import BACKENDS
from longspec.models.draft_files import draft_window
from longspec.models.families import family_class
from longspec.models.glide import GlideMixin
from longspec.signals import StopSignals, exit_code

WARM_UP_TOKENS = 16
DTYPES = ("auto", "float32", "float16", "bfloat16")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


@reports_user_errors
def main(argv: Sequence[str] | None = None) -> dict[str, Any]:
    """Run one method on one task and return the summary; an interrupted run continues after its last line.

    Bad input ends the process with exit code 2. A stop signal ends it with 128 + its number: at once while the run is
    prepared, and later after the batch that is running.
    """
    with StopSignals(at_once=True) as stop:
        try:
            plan = make_plan(parse_options(argv))
            with open_report(plan.output_dir, plan.run, plan.options.overwrite) as report:
                return measure(plan, report, stop)
        except SystemExit:
            if stop.received is not None and stop.at_once:
                print(f"stopped by {signal.Signals(stop.received).name} before the measurement", file=sys.stderr)
            raise


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


def parse_options(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command's options, with what they are by default in `defaults`.

    Raises UserError for an option that does not parse.
    """
    parser = _Parser(description="Measure a target, alone or with its draft.", allow_abbrev=False)
    add = parser.add_argument
    add("--model_name", choices=PAIRS, help="a pair of target and draft")
    add("--target", help="folder, hub id or .gguf file of any target")
    add("--draft", help="its draft: .pth file, folder or hub id (for seq and tree)")
    add("--method", choices=METHODS, default="tree")
    add("--task", choices=TASKS, required=True)
    add("--data_path_prefix", required=True, help="folder that holds <task>.jsonl")
    add("--test_length", type=int, default=0, help="samples to run, 0 for all")
    add("--max_gen_len", type=int, help="new tokens a sample; by default the task's own")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add("--top_p", type=float, default=1.0)
    add("--top_k", type=int, default=0)
    add(
        "--tree_shape",
        type=_width,
        nargs="*",
        default=list(DEFAULT_SHAPE),
        help="nodes of each level (tree), or auto: the fastest, measured once for a model, GPU and context, and cached",
    )
    add(
        "--tree_rule",
        choices=TREE_RULES,
        default=TREE_RULES[0],
        help="how a tree is drawn and accepted above temperature 0",
    )
    add("--gamma", type=int, default=4, help="length of the chain (seq, magicdec, lookup)")
    add("--seed", type=int, default=0)
    add("--batch_size", type=int, default=1)
    add("--output_dir", help="default: one per configuration, outputs/inference/<model>/<task>/<options>")
    add("--overwrite", action="store_true", help="replace the results in the output folder, of whatever run they are")
    add(
        "--chat_format",
        choices=CHAT_FORMAT_CHOICES,
        default=AUTO_FORMAT,
        help="default: the published one for the published targets, else the tokenizer's template, else plain text",
    )
    add("--prompt_file", help="JSON file {task: text with {context} and {input}}, in place of the built-in prompts")
    add("--min_prompt_len", type=int, default=MIN_PROMPT_LEN, help="LongBench: leave out prompts up to this length")
    add("--headroom", type=int, default=HEADROOM, help="LongBench: leave out prompts over window - headroom")
    add("--dtype", choices=DTYPES, default="auto", help="auto: the target's own, on a CPU float32")
    add("--device", help="default: cuda where there is one")
    add("--attention", choices=("auto", *BACKENDS), default="auto", help="what decoding's attention runs on")
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="on CUDA: fused layers, each round one CUDA graph",
    )
    options = parser.parse_args(argv)
    options.defaults = {name: parser.get_default(name) for name in vars(options)}
    options.tree_shape = AUTO if options.tree_shape == [AUTO] else options.tree_shape
    return options


def _width(value: str) -> int | str:
    try:
        return AUTO if value == AUTO else int(value)
    except ValueError:
        raise argparse.ArgumentTypeError(f"invalid int value: {value!r}, nor is it {AUTO}") from None


def load_model(plan: Plan) -> GlideMixin:
    """Target and draft on the plan's device; without a draft in use, a fresh one that nothing reads."""
    model_class = family_class(plan.config, plan.pair.target)
    model = model_class.from_pretrained(
        plan.pair.target,
        state_dict=plan.draft_state,
        torch_dtype=plan.dtype,
        window=draft_window(plan.draft) if plan.draft else None,
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
