"""Acceptance lengths that evaluations of a real pair measured, for the tokens/s of benchmarks on random weights."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longspec.errors import UserError

Key = tuple[str, tuple[int, ...], int | None]
"""Method; its tree shape, (gamma,) of a chain, or () without a draft; the nodes verified of a tree, None for all."""


def key(method: str, config: Mapping[str, Any]) -> Key:
    """The key of a run with the options `config`, which has `tree_shape` and `gamma`."""
    if method == "vanilla":
        return method, (), None
    if method == "tree":
        return method, tuple(config["tree_shape"]), config.get("tree_nodes")
    return method, (config["gamma"],), None


def read_acceptance(files: Sequence[Path]) -> dict[Key, float]:
    """Tokens per round by key from the `summary.json` of evaluations (`inference_long-bench.py`).

    Evaluations with the same key are pooled, so that every round has the same weight. Raises UserError for other files
    and for several pairs or temperatures, whose acceptance is not comparable.
    """
    tokens: dict[Key, int] = defaultdict(int)
    rounds: dict[Key, int] = defaultdict(int)
    runs = set()
    for path in files:
        try:
            summary = json.loads(path.read_text())
            config = summary["config"]
            run = key(summary["method"], config)
            tokens[run] += summary["decoded_tokens"]
            rounds[run] += summary["rounds"]
            runs.add((summary["model"], config["draft"], config["temperature"]))
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UserError(f"--acceptance {path}: not the summary.json of an evaluation ({error!r})") from error
    if len(runs) > 1:
        raise UserError(
            f"--acceptance: give evaluations of one pair at one temperature, not of {sorted(map(str, runs))}"
        )
    return {run: tokens[run] / rounds[run] for run in rounds if rounds[run]}
