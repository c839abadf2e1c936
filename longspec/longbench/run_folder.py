"""The folder of a run: its default name, and the check that it holds no results of a different run."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longspec.errors import UserError
from longspec.locks import locked
from longspec.longbench.report import RUN_NAME, SAMPLES_NAME, SUMMARY_NAME, Report
from longspec.parts import all_parts, open_part, part_paths

LABELS = {
    "tree_shape": "",
    "gamma": "gamma",
    "temperature": "t",
    "tree_rule": "",
    "tree_nodes": "nodes",
    "lookup_branches": "lookup",
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
"""Abbreviations of the options that a folder's name spells out. The digest at its end covers all other options."""
ALWAYS_NAMED = ("tree_shape", "gamma", "temperature", "dtype")
"""Options in the folder's name even at their default values."""
DIGEST_LENGTH = 8
"""Number of hexadecimal digits in the folder's name."""
LONGEST_NAME = 120
"""Number of characters of the folder's name without the digest."""
DIGESTS = ("target", "draft", "data", "prompts")
"""Entries of a configuration that are digests of files and prompts."""

Configuration = Mapping[str, Any]
"""Everything that distinguishes a run from others, as JSON values: options, digests of inputs, device, versions."""


def folder_name(configuration: Configuration, defaults: Mapping[str, Any]) -> str:
    """A readable name that differs between configurations, as in `tree_4-16-16-16-16_t0.7_seed3_bfloat16_1a2b3c4d`.

    It consists of the method, the tree shape or gamma, the temperature, the options that differ from their defaults,
    the dtype, and a short digest of the whole configuration.
    """
    # Options at their defaults are left out, so that names stay short.
    parts = [configuration["method"]]
    for name, label in LABELS.items():
        if name in configuration and (name in ALWAYS_NAMED or configuration[name] != defaults[name]):
            parts.append(label + _spelled(configuration[name]))
    # File systems limit names to 255 bytes; the digest keeps cut names distinct.
    readable = re.sub(r"[^\w.,+-]", "-", "_".join(parts))[:LONGEST_NAME]
    content = json.dumps(configuration, sort_keys=True).encode()
    return f"{readable}_{hashlib.blake2b(content).hexdigest()[:DIGEST_LENGTH]}"


def _spelled(value: object) -> str:
    if isinstance(value, bool):
        return ""  # the label of a switch says enough
    if isinstance(value, list | tuple):
        return "-".join(map(str, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


@contextmanager
def open_report(folder: Path, record: Mapping[str, Any], overwrite: bool) -> Iterator[Report]:
    """The report in `folder`, which is created if needed and locked until the context ends.

    record: stored with the results; its entry "run" is the configuration. The report starts with the results of an
    interrupted run of the same configuration; with `overwrite` the first new result replaces all earlier ones. Raises
    UserError, before any result changes, for a folder that cannot be written, that another process writes to, or that
    holds results of a different run.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--output_dir: {folder} cannot be created ({error.strerror})") from error
    # Two processes that append to one file would mix their lines.
    with locked(folder):
        with all_parts(folder / SAMPLES_NAME):
            pass  # no rank of an earlier run may still write
        if not overwrite:
            _check_same_run(folder, record["run"])
        report = Report(folder, resume=not overwrite, record=dict(record))
        if not overwrite:
            report.processes = _stored(folder / RUN_NAME).get("processes", 1)
            report.collect()
        yield report


@contextmanager
def open_part_report(folder: Path, rank: int, done: Iterable[int]) -> Iterator[Report]:
    """The report of a rank other than 0, whose part file is locked until the context ends.

    done: indices of the samples that have a line in `samples.jsonl`. Raises UserError if the file cannot be written.
    """
    with open_part(folder / SAMPLES_NAME, rank) as part:
        yield Report(folder, name=Path(part.name).name, done=done)


def _check_same_run(folder: Path, configuration: Configuration) -> None:
    """Raise UserError if `folder` holds results of a run with another configuration."""
    results = [folder / SAMPLES_NAME, folder / SUMMARY_NAME, *part_paths(folder / SAMPLES_NAME)]
    # A run that met a full disk before its first result leaves an empty file.
    if not any(file.exists() and file.stat().st_size for file in results):
        return
    advice = "choose another --output_dir, or replace these results with --overwrite"
    stored = _stored(folder / RUN_NAME).get("run")
    if not isinstance(stored, dict):
        raise UserError(f"{folder}: holds results without a readable {RUN_NAME}; {advice}")
    if differing := differences(stored, configuration):
        raise UserError(f"{folder}: holds results of a different run ({differing}); {advice}")


def differences(stored: Configuration, current: Configuration) -> str:
    """The entries that differ between two configurations; empty if none does."""
    # As JSON stores it: tuples become lists.
    stored, current = (json.loads(json.dumps(configuration)) for configuration in (stored, current))
    differing = [name for name in {**stored, **current} if stored.get(name) != current.get(name)]
    return "; ".join(_difference(name, stored.get(name), current.get(name)) for name in differing)


def _difference(name: str, stored: object, current: object) -> str:
    if name in DIGESTS:
        return f"{name}: other content"
    return f"{name}: {json.dumps(stored)} there, {json.dumps(current)} here"


def _stored(path: Path) -> dict[str, Any]:
    """The record in `path`; empty if there is none."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}
