"""The command `inference_long-bench.py`: options and data are checked first, then weights are loaded and timed."""

from __future__ import annotations

import argparse
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from longspec.data.target_format import AUTO as AUTO_FORMAT
from longspec.data.target_format import CHAT_FORMAT_CHOICES
from longspec.errors import UserError, reports_user_errors
from longspec.inference.methods import AUTO, DEFAULT_SHAPE, METHODS, TREE_RULES
from longspec.inference.pairs import PAIRS
from longspec.inference.tasks import HEADROOM, MIN_PROMPT_LEN, TASKS
from longspec.kernels import BACKENDS
from longspec.signals import StopSignals

DTYPES = ("auto", "float32", "float16", "bfloat16")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


@reports_user_errors
def main(argv: Sequence[str] | None = None, prog: str | None = None) -> dict[str, Any]:
    """Run one method on one task and return the summary; an interrupted run continues after its last line.

    Bad input ends the process with exit code 2. A stop signal ends it with 128 + its number: at once while the run is
    prepared, and later after the batch that is running.
    """
    with StopSignals(at_once=True) as stop:
        try:
            options = parse_options(argv, prog)
            # Imported now, so that --help and a misspelled option do not wait for torch.
            from longspec.inference.measurement import measure
            from longspec.inference.plan import make_plan
            from longspec.inference.run_folder import open_report

            plan = make_plan(options)
            with open_report(plan.output_dir, plan.run, plan.options.overwrite) as report:
                return measure(plan, report, stop)
        except SystemExit:
            if stop.received is not None and stop.at_once:
                print(f"stopped by {signal.Signals(stop.received).name} before the measurement", file=sys.stderr)
            raise


def parse_options(argv: Sequence[str] | None = None, prog: str | None = None) -> argparse.Namespace:
    """The command's options, with what they are by default in `defaults`.

    Raises UserError for an option that does not parse.
    """
    parser = _Parser(
        prog=prog,
        description="Measure a target, alone or with its draft. The options alone define the sampling: the target's "
        "generation_config.json does not apply.",
        allow_abbrev=False,
    )
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
    add(
        "--chat_template_kwargs",
        help='variables of the chat template, as JSON: {"enable_thinking": false} for Qwen3 without thinking',
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
