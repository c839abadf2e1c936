"""The folder of a run: its default name, the stored configuration, and whose results it may receive."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longspec.errors import UserError
from longspec.inference.report import RUN_NAME, SAMPLES_NAME, SUMMARY_NAME, Report
from longspec.locks import locked

LABELS = {
    "tree_shape": "",
    "gamma": "gamma",
    "temperature": "t",
    "tree_rule": "",
    "top_p": "top_p",
    "top_k": "top_k",
    "seed": "seed",
    "max_gen_len": "len",
    "test_length": "first",
    "batch_size": "batch",
    "min_prompt_len": "over",
    "headroom": "headroom",
    "chat_format": "",
    "dtype": "",
}
"""The options that a folder's name spells out, with their abbreviations; the digest at its end covers all others."""
ALWAYS_NAMED = ("tree_shape", "gamma", "temperature", "dtype")
DIGEST_LENGTH = 8
LONGEST_NAME = 120
CONTENTS = ("target", "draft", "data", "prompts")
"""Entries of a configuration that are digests."""

Configuration = Mapping[str, Any]
"""Everything that distinguishes a run from others, as JSON values: options, digests of its inputs, device, versions."""


def folder_name(run: Configuration, defaults: Mapping[str, Any]) -> str:
    """A readable name that differs for different configurations.

    It has the method, the tree shape or gamma, the temperature, the options that are not at their default, the dtype
    and a short digest of the whole configuration, as in `tree_4-16-16-16-16_t0.7_seed3_bfloat16_1a2b3c4d`.
    """
    named = [name for name in LABELS if name in run and (name in ALWAYS_NAMED or run[name] != defaults[name])]
    parts = [run["method"], *(LABELS[name] + _spelled(run[name]) for name in named)]
    readable = re.sub(r"[^\w.,+-]", "-", "_".join(parts))[:LONGEST_NAME]
    content = json.dumps(run, sort_keys=True).encode()
    return f"{readable}_{hashlib.blake2b(content).hexdigest()[:DIGEST_LENGTH]}"


def _spelled(value: object) -> str:
    if isinstance(value, list | tuple):
        return "-".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


@contextmanager
def open_report(folder: Path, run: Configuration, overwrite: bool) -> Iterator[Report]:
    """The report of the run with configuration `run` in `folder`, which is locked until the context ends.

    Results that are already there are kept: the report starts with those of an interrupted run of the same
    configuration. With `overwrite` the first new result replaces them. Raises UserError, before any result is changed,
    for a folder that cannot be written, that another process writes to or that holds results of another run.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output_dir: {folder} cannot be created ({error.strerror})") from error
    with locked(folder):
        if not overwrite:
            _compare(folder, run)
        yield Report(folder, resume=not overwrite)


def _compare(folder: Path, run: Configuration) -> None:
    """Raise UserError if `folder` holds results that are not of `run`."""
    results = [folder / name for name in (SAMPLES_NAME, SUMMARY_NAME)]
    if not any(file.exists() and file.stat().st_size for file in results):
        return
    ways_out = "choose another --output_dir, or replace these results with --overwrite"
    stored = _stored(folder / RUN_NAME)
    if stored is None:
        raise UserError(f"{folder}: holds results without a readable {RUN_NAME}; {ways_out}")
    current = json.loads(json.dumps(run))
    names = [name for name in {**stored, **current} if stored.get(name) != current.get(name)]
    if names:
        differences = "; ".join(_difference(name, stored.get(name), current.get(name)) for name in names)
        raise UserError(f"{folder}: holds results of a different run ({differences}); {ways_out}")


def _difference(name: str, stored: object, current: object) -> str:
    if name in CONTENTS:
        return f"{name}: other content"
    return f"{name}: {json.dumps(stored)} there, {json.dumps(current)} here"


def _stored(path: Path) -> dict[str, Any] | None:
    """The configuration in `path`; None if there is none."""
    try:
        return dict(json.loads(path.read_bytes())["run"])
    except (OSError, ValueError, TypeError, KeyError):
        return None
