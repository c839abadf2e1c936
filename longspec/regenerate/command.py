"""The command `python -m longspec.regenerate`. Under torchrun each rank writes its share of the shards."""

from collections.abc import Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

import transformers

from longspec.command_line import Parser, add_device_options, add_drafting_options, add_sampling_options
from longspec.data.target_format import CHAT_FORMAT_CHOICES
from longspec.errors import reports_user_errors
from longspec.inference.process_group import shared_target
from longspec.inference.token_options import COMMAND_OPTIONS, given_options
from longspec.models.packaged_targets import SMOLLM2
from longspec.ranks.replicas import joined_replicas
from longspec.regenerate.run import regenerate
from longspec.regenerate.settings import SPLITS, Settings
from longspec.regenerate.shards import describe
from longspec.signals import StopSignals

EXAMPLES = (
    "longspec regenerate --output_dir data --count 20000",
    "longspec regenerate --target TARGET --files questions.jsonl --output_dir data --temperatures 0 0.7 1",
    "torchrun --nproc_per_node 8 -m longspec.regenerate --target TARGET --output_dir data --count 20000",
)


@reports_user_errors
def main(argv: Sequence[str] | None = None, prog: str = "python -m longspec.regenerate") -> Path | None:
    """Write a split, and return its path on rank 0. A stop signal ends it at once; complete shards are kept."""
    options = vars(_parser(prog).parse_args(argv))
    dtype, device, tp_size = (options.pop(name) for name in ("dtype", "device", "tp_size"))
    options["token_options"] = given_options(options) or None

    transformers.utils.logging.disable_progress_bar()
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in options.items()
        if name not in COMMAND_OPTIONS
    }
    note = "; the same command continues, and complete shards are kept"
    with (
        StopSignals(at_once=True, note=note) as stop,
        shared_target(tp_size, device, stop),
        joined_replicas(tp_size) as replicas,
    ):
        path = regenerate(Settings(**settings), dtype, replicas.device(device), replicas)

    if path is not None:
        print(f"written to {path}: {describe(path)}")
    return path


def _parser(prog: str) -> Parser:
    parser = Parser(
        EXAMPLES,
        prog=prog,
        usage="%(prog)s --output_dir DIR [options]",
        description="Write training text with a target: answers to your prompts, or whole conversations.",
    )
    add = parser.add_argument_group("target").add_argument
    add("--target", default=SMOLLM2, help="name of a pair, folder, hub id or .gguf file")
    add("--chat_format", choices=CHAT_FORMAT_CHOICES, help="as in evaluation")
    add("--chat_template_kwargs", help="variables of the chat template, as JSON")
    add_device_options(add)

    add = parser.add_argument_group("prompts").add_argument
    add("--files", nargs="+", help="JSONL with prompts; without them the target writes the user turns")
    add("--count", type=int, help="number of prompts to write, or of records in --files to answer (0: all)")
    add("--max_prompt_tokens", type=int, help="leave out longer prompts (0: keep all that fit)")
    add("--max_turn_tokens", type=int, help="longest user turn that the target writes")
    add("--exclude", nargs="+", help="files of other splits, whose prompts to leave out")

    add = parser.add_argument_group("answers").add_argument
    add("--temperatures", type=float, nargs="+", help="temperatures to draw from, for each answer; 0 is greedy")
    add_sampling_options(add)
    add("--max_new_tokens", type=int, help="longest answer, in tokens")
    add("--seed", type=int, help="of prompts and answers")

    add = parser.add_argument_group("decoding").add_argument
    add("--draft", help=".pth file, folder or hub id; default: that of the pair")
    add_drafting_options(add, "vanilla")

    add = parser.add_argument_group("output").add_argument
    add("--output_dir", required=True, help="folder for SPLIT.jsonl and SPLIT.provenance.yaml")
    add("--split", choices=SPLITS, help="name of the file")
    add("--batch_size", type=int, help="largest number of rows in a batch")
    add("--shard_size", type=int, help="prompts per shard, the unit of writing and resuming (0: a 128th of all)")
    defaults = {field.name: field.default for field in fields(Settings) if field.default is not MISSING}
    parser.set_defaults(**defaults)
    return parser
