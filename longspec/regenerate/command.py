"""The command `python -m longspec.regenerate`. Under torchrun each rank writes its share of the shards."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import transformers

from longspec.data.target_format import CHAT_FORMAT_CHOICES
from longspec.errors import UserError, reports_user_errors
from longspec.ranks.replicas import joined_replicas
from longspec.regenerate.run import regenerate
from longspec.regenerate.settings import SPLITS, Settings
from longspec.signals import StopSignals

DEFAULTS = {field.name: field.default for field in fields(Settings)}


class _Parser(argparse.ArgumentParser):
    """A parser that reports its errors as UserError."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


@reports_user_errors
def main(argv: Sequence[str] | None = None, prog: str = "python -m longspec.regenerate") -> Path | None:
    """Write a split. Returns the path of its file on rank 0, None on other ranks.

    A stop signal ends the process at once with 128 + its number; complete shards are kept.
    """
    options = vars(_parser(prog).parse_args(argv))
    dtype = options.pop("dtype")
    device = options.pop("device")

    transformers.utils.logging.disable_progress_bar()
    settings: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in options.items()
    }
    with StopSignals(at_once=True) as stop:
        try:
            with joined_replicas() as replicas:
                path = regenerate(Settings(**settings), dtype, replicas.device(device), replicas)
        except SystemExit:
            if stop.received is not None and os.environ.get("RANK", "0") == "0":
                name = signal.Signals(stop.received).name
                print(f"stopped by {name}; the same command continues after the last complete shard", file=sys.stderr)
            raise

    if path is not None:
        print(f"written to {path}")
    return path


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=prog, description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--target", required=True, help="smollm2-135m, a published pair by name, a folder, a hub id or a .gguf file")
    add("--output_dir", required=True, help="folder for SPLIT.jsonl and SPLIT.provenance.yaml")
    add("--split", choices=SPLITS, default="train")
    add("--files", nargs="+", default=(), help="JSONL with prompts; without them the target writes the user turns")
    add("--count", type=int, help="number of prompts to write, or of records in --files to answer (0: all)")
    add("--temperatures", type=float, nargs="+", help="temperatures to draw from, for each answer; 0 is greedy")
    add("--max_new_tokens", type=int, help="longest answer, in tokens")
    add("--max_prompt_tokens", type=int, help="leave out longer prompts (0: keep all that fit)")
    add("--max_turn_tokens", type=int, help="leave out longer user turns that the target writes")
    add("--batch_size", type=int, help="largest number of rows in a batch")
    add("--shard_size", type=int, help="prompts per shard, the unit of writing and resuming")
    add("--seed", type=int)
    add("--chat_format", choices=CHAT_FORMAT_CHOICES, help="default: auto, as for evaluation")
    add("--chat_template_kwargs", help="variables of the chat template, as JSON")
    add("--exclude", nargs="+", default=(), help="files of other splits, whose prompts to leave out")
    add("--dtype", default="auto", help="auto, float32, float16 or bfloat16")
    add("--device", help="default: cuda if there is one; under torchrun that of the rank")
    parser.set_defaults(**{name: value for name, value in DEFAULTS.items() if name not in ("target", "output_dir")})
    return parser
