"""The command `inference_long-bench.py`: checks options and data first, then loads the weights and measures."""

import argparse
from collections.abc import Sequence
from typing import Any

from longspec.command_line import Parser, add_device_options, add_drafting_options, add_sampling_options
from longspec.data.target_format import AUTO as AUTO_FORMAT
from longspec.data.target_format import CHAT_FORMAT_CHOICES
from longspec.errors import reports_user_errors
from longspec.inference.pairs import PAIRS
from longspec.inference.request import FILTER_OPTIONS
from longspec.inference.token_options import given_options
from longspec.kernels import ATTENTIONS, DETERMINISTIC
from longspec.longbench.prompts import DEFAULT_HEADROOM, DEFAULT_MIN_PROMPT_LEN
from longspec.longbench.tasks import TASKS
from longspec.models.packaged_targets import SMOLLM2
from longspec.signals import StopSignals

EXAMPLES = (
    "longspec evaluate --task gov_report --data_path_prefix DIR",
    "longspec evaluate --target TARGET --draft DRAFT --method auto --task qmsum --data_path_prefix DIR",
    "torchrun --nproc_per_node 8 inference_long-bench.py --model_name llama8b --task lcc --data_path_prefix DIR",
)


@reports_user_errors
def main(argv: Sequence[str] | None = None, prog: str | None = None) -> dict[str, Any] | None:
    """Run one method on one task and return the summary. An interrupted run continues after its last line.

    Under torchrun the ranks share the samples, and only rank 0 returns the summary. Bad input ends the process with
    exit code 2. A stop signal ends it with 128 + its number: at once during the preparation, after the running batch
    during the measurement.
    """
    with StopSignals(at_once=True, note=" before the measurement") as stop:
        options = parse_options(argv, prog)
        # Imported here, so that --help and a misspelled option do not wait for torch.
        from longspec.inference.process_group import shared_target
        from longspec.longbench.measurement import measure
        from longspec.ranks.replicas import joined_replicas

        with shared_target(options.tp_size, options.device, stop), joined_replicas(options.tp_size) as replicas:
            return measure(options, stop, replicas)


def parse_options(argv: Sequence[str] | None = None, prog: str | None = None) -> argparse.Namespace:
    """The options. Raises UserError for one that does not parse."""
    parser = Parser(
        EXAMPLES,
        prog=prog,
        usage="%(prog)s --task TASK --data_path_prefix DIR [options]",
        description="Measure a target, alone or with its draft. The options alone define the sampling: the target's\n"
        "generation_config.json does not apply.",
    )
    _add_pair(parser)
    _add_prompts(parser)
    _add_decoding(parser)
    _add_run(parser)
    options = parser.parse_args(argv)
    options.token_options = given_options(vars(options))
    for name in FILTER_OPTIONS:  # not part of the run's configuration unless they are given
        if (value := vars(options).pop(name)) is not None:
            options.token_options[name] = value
    return options


def _add_pair(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("pair").add_argument
    add("--model_name", choices=PAIRS, help=f"pair of target and draft, by name; default: {SMOLLM2}")
    add("--target", help="name, folder, hub id or .gguf file of any target")
    add("--draft", help="draft of the target: .pth file, folder or hub id; default: that of a pair with a name")


def _add_prompts(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("prompts").add_argument
    add("--task", choices=TASKS, required=True, help="task of LongBench, or aime24")
    add("--data_path_prefix", required=True, help="folder that holds <task>.jsonl")
    add("--test_length", type=int, default=0, help="number of samples to run, 0 for all")
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
    add("--prompt_file", help="JSON file {task: text with {context} and {input}} that replaces the built-in prompts")
    add(
        "--min_prompt_len",
        type=int,
        default=DEFAULT_MIN_PROMPT_LEN,
        help="LongBench: leave out prompts of this many tokens or fewer",
    )
    add(
        "--headroom",
        type=int,
        default=DEFAULT_HEADROOM,
        help="LongBench: leave out prompts longer than the target's context length minus this",
    )


def _add_decoding(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument_group("decoding").add_argument
    add("--max_gen_len", type=int, help="new tokens per sample; default: that of the task")
    add("--temperature", type=float, default=0.0, help="0 is greedy")
    add_sampling_options(add)
    add_drafting_options(add, "tree")
    add("--seed", type=int, default=0, help="of the random numbers above temperature 0")


def _add_run(parser: argparse.ArgumentParser) -> None:
    run = parser.add_argument_group("run")
    add = run.add_argument
    add("--batch_size", type=int, default=1, help="samples that are decoded together")
    add("--output_dir", help="default: one per configuration, outputs/inference/<model>/<task>/<options>")
    add("--overwrite", action="store_true", help="replace the results in the output folder, whichever run wrote them")
    add_device_options(add)
    backend = run.add_mutually_exclusive_group()
    attention = "backend of the attention in decoding"
    backend.add_argument("--attention", choices=("auto", *ATTENTIONS), default="auto", help=attention)
    backend.add_argument(
        "--deterministic",
        dest="attention",
        action="store_const",
        const=DETERMINISTIC,
        default="auto",
        help="greedy answers that no method or batch changes, in half precision, too; slower",
    )
    add(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="fused layers, and on CUDA one graph per round",
    )
