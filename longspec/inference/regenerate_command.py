"""The command `python -m longspec.regenerate`; under torchrun each rank writes its share of the shards."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

import torch
import transformers

from longspec.data.target_format import CHAT_FORMAT_CHOICES
from longspec.errors import UserError, reports_user_errors
from longspec.inference.regenerate import SPLITS, Settings, regenerate
from longspec.signals import StopSignals

DEFAULTS = {field.name: field.default for field in fields(Settings)}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see --help)")


@reports_user_errors
def main(argv: Sequence[str] | None = None, prog: str = "python -m longspec.regenerate") -> Path | None:
    """Write a split; the path of its file, or None on a rank that ends before the others.

    A stop signal ends it at once with 128 + its number; whole shards stay.
    """
    options = vars(_parser(prog).parse_args(argv))
    dtype, device = options.pop("dtype"), options.pop("device")
    rank, world = _launched("RANK", 0), _launched("WORLD_SIZE", 1)
    if device is None and torch.cuda.is_available():
        device = f"cuda:{os.environ.get('LOCAL_RANK', 0)}"
    transformers.utils.logging.disable_progress_bar()
    values: dict[str, Any] = {name: tuple(one) if isinstance(one, list) else one for name, one in options.items()}
    with StopSignals(at_once=True) as stop:
        try:
            path = regenerate(Settings(**values), dtype, device, rank, world)
        except SystemExit:
            if stop.received is not None:
                name = signal.Signals(stop.received).name
                print(f"stopped by {name}; the same command continues after the last whole shard", file=sys.stderr)
            raise
    if path is not None:
        print(f"written to {path}")
    return path


def _launched(name: str, default: int) -> int:
    value = os.environ.get(name, str(default))
    if not value.isdecimal():
        raise UserError(f"environment variable {name}: {value!r} is not a number; use torchrun, or unset it")
    return int(value)


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = _Parser(prog=prog, description=__doc__, allow_abbrev=False)
    add = parser.add_argument
    add("--target", required=True, help="smollm2-135m, a published pair's name, a folder, a hub id or a .gguf file")
    add("--output_dir", required=True, help="gets SPLIT.jsonl and SPLIT.provenance.yaml")
    add("--split", choices=SPLITS, default="train")
    add("--files", nargs="+", default=(), help="JSONL with prompts; without it the target writes the user turns")
    add("--count", type=int, help="prompts to write, or the first records of --files to answer (0: all)")
    add("--temperatures", type=float, nargs="+", help="each answer takes one of them; 0 is greedy")
    add("--max_new_tokens", type=int, help="most tokens of an answer")
    add("--max_prompt_tokens", type=int, help="longer prompts are left out (0: all that fit)")
    add("--max_turn_tokens", type=int, help="longer user turns of the target's own are left out")
    add("--batch_size", type=int, help="most rows of a batch")
    add("--shard_size", type=int, help="prompts per shard, the unit that is written and resumed")
    add("--seed", type=int)
    add("--chat_format", choices=CHAT_FORMAT_CHOICES, help="default: auto, as for evaluation")
    add("--chat_template_kwargs", help="variables of the chat template, as JSON")
    add("--exclude", nargs="+", default=(), help="files of other splits, whose prompts are left out")
    add("--dtype", default="auto", help="auto, float32, float16 or bfloat16")
    add("--device", help="default: CUDA where there is one, the rank's own under torchrun")
    parser.set_defaults(**{name: value for name, value in DEFAULTS.items() if name not in ("target", "output_dir")})
    return parser
