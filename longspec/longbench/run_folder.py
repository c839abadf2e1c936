"""The folder of a run: its default name, and the check that it holds no results of a different run."""

import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from longspec.errors import UserError
from longspec.jobs.job import Identity, differences
from longspec.jobs.results import ADVICE, Results, part_paths
from longspec.locks import locked
from longspec.longbench.report import read_line, write_json

DIGEST_LENGTH = 8
"""Number of hexadecimal digits in the folder's name."""
LONGEST_SHAPE = 80
"""Number of characters of a tree's shape in the folder's name."""
RUN_NAME = "run.json"
SAMPLES_NAME = "samples.jsonl"
SUMMARY_NAME = "summary.json"


def folder_name(configuration: Identity) -> str:
    """The main options and a digest of the whole configuration, as in `tree_4-16-16-16-16_t0.7_bfloat16_1a2b3c4d`."""
    method, temperature, dtype = (configuration[name] for name in ("method", "temperature", "dtype"))
    tree = "-".join(map(str, configuration["tree_shape"]))[:LONGEST_SHAPE]
    shape = {"tree": tree, "auto": tree, "vanilla": ""}.get(method, f"gamma{configuration['gamma']}")
    digest = hashlib.blake2b(json.dumps(configuration, sort_keys=True).encode()).hexdigest()[:DIGEST_LENGTH]
    return "_".join(filter(None, [method, shape, f"t{temperature:g}", dtype, digest]))


@contextmanager
def open_run(folder: Path, record: dict[str, Any], overwrite: bool) -> Iterator[Results]:
    """The results in `folder`, which is created if needed and locked until the context ends.

    record: its entry "run" is the configuration, and "processes" is set here to the number of ranks of the largest
    launch so far. Raises UserError for a folder that cannot be written, that another process writes to, or that
    holds results of a different run without `overwrite`.
    """
    # Two processes that append to one file would mix their lines.
    with locked(folder):
        if not overwrite:
            _check_same_run(folder, record["run"])
            record["processes"] = _stored(folder / RUN_NAME).get("processes", 1)
        yield Results(folder / SAMPLES_NAME, read_line, overwrite)


def start_run(results: Results, record: dict[str, Any] | None) -> None:
    """Remove what does not belong to the run, and store the record, which only rank 0 has. Raises UserError."""
    results.start()
    if record is not None:
        results.path.with_name(SUMMARY_NAME).unlink(missing_ok=True)
        write_json(results.path.with_name(RUN_NAME), record)


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
