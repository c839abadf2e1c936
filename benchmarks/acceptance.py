"""Acceptance lengths that `longspec draft` measured on a real pair, for the tokens/s of random weights."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from longspec.errors import UserError

Key = tuple[str, float, str]
"""Method, temperature, and the options that determine its acceptance length, as JSON."""
OPTIONS = {"vanilla": (), "tree": ("tree_shape", "tree_nodes", "lookup_branches")}
"""These options; `gamma` of other methods."""


def key(method: str, config: Mapping[str, Any]) -> Key:
    """The key of a method with the options `config`."""
    options = [config[name] for name in OPTIONS.get(method, ("gamma",))]
    return method, float(config["temperature"]), json.dumps(options)


def read_acceptance(file: Path | None) -> dict[Key, float]:
    """Tokens per round in the `summary.json` of a report, over the outputs without loops of all tasks.

    Raises UserError for any other file.
    """
    if file is None:
        return {}
    try:
        summary = json.loads(file.read_text())
        rows = [row for row in summary["tables"]["Methods"] if row["task"] == "all"]
        figures = {(row["method"], row["T"]): row["tokens per round"] for row in rows}
        return {
            # Text such as "4.04 ± 0.09"; "-" if no round was measured.
            key(method["method"] or method["name"], method | {"temperature": t}): float(figure.split()[0])
            for method in summary["settings"]["evaluation"]["methods"]
            for t in method["temperatures"]
            if (figure := figures.get((method["name"], t), "-")) != "-"
        }
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UserError(f"--acceptance {file}: not the summary.json of `longspec draft` ({error!r})") from error
