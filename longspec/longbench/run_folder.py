"""The folder of a run: its default name, and the check that it holds no results of a different run."""

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longspec.errors import UserError
from longspec.jobs.job import Identity, differences
from longspec.jobs.results import ADVICE, Results, part_paths, resume_results
from longspec.locks import locked
from longspec.longbench.report import read_line, write_json

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
RUN_NAME = "run.json"
SAMPLES_NAME = "samples.jsonl"
SUMMARY_NAME = "summary.json"


def folder_name(configuration: Identity, defaults: Mapping[str, Any]) -> str:
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
def open_run(folder: Path, record: dict[str, Any], overwrite: bool) -> Iterator[Results]:
    """The results in `folder`, which is created if needed and locked until the context ends.

    record: stored with the first new result; its entry "run" is the configuration, and "processes" is set here to the
    number of ranks of the largest launch so far. The results are those of an interrupted run of the same
    configuration; with `overwrite` the first new one replaces all earlier ones. Raises UserError, before any result
    changes, for a folder that cannot be written, that another process writes to, or that holds results of a different
    run.
    """
    # Two processes that append to one file would mix their lines.
    with locked(folder):
        if not overwrite:
            _check_same_run(folder, record["run"])
            record["processes"] = _stored(folder / RUN_NAME).get("processes", 1)

        def store_record() -> None:
            if overwrite:
                (folder / SUMMARY_NAME).unlink(missing_ok=True)
            write_json(folder / RUN_NAME, record)

        yield resume_results(folder / SAMPLES_NAME, read_line, overwrite, store_record)


def _check_same_run(folder: Path, configuration: Identity) -> None:
    """Raise UserError if `folder` holds results of a run with another configuration."""
    files = [folder / SAMPLES_NAME, folder / SUMMARY_NAME, *part_paths(folder / SAMPLES_NAME)]
    # A run that met a full disk before its first result leaves an empty file.
    if not any(file.exists() and file.stat().st_size for file in files):
        return
    stored = _stored(folder / RUN_NAME).get("run")
    if not isinstance(stored, dict):
        raise UserError(f"{folder}: holds results without a readable {RUN_NAME}; {ADVICE}")
    if differing := differences(stored, configuration):
        raise UserError(f"{folder}: holds results of a different run ({differing}); {ADVICE}")


def _stored(path: Path) -> dict[str, Any]:
    """The record in `path`; empty if there is none."""
    try:
        return dict(json.loads(path.read_bytes()))
    except (OSError, ValueError, TypeError):
        return {}
