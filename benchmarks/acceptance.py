"""Acceptance lengths that were measured on a real pair, for the tokens/s of benchmarks on random weights."""

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from longspec.errors import UserError


class Key(NamedTuple):
    """The options that determine the acceptance length of a pair."""

    method: str
    temperature: float
    shape: tuple[int, ...] = ()
    """Tree shape; (gamma,) of a chain; empty without a draft."""
    nodes: int | None = None
    """Nodes of a tree that are verified, the root included; None for all."""
    lookup_branches: bool = False
    descends: bool = False
    """Whether a tree above temperature 0 has the rule "descend". At temperature 0 all rules are the same."""


def key(method: str, config: Mapping[str, Any]) -> Key:
    """The key of a run with the options `config`, which has `temperature`, `tree_shape` and `gamma`."""
    temperature = float(config["temperature"])
    if method == "vanilla":
        return Key(method, temperature)
    if method == "tree":
        branches = config.get("lookup_branches", False)
        descends = temperature > 0 and config.get("tree_rule") == "descend"
        return Key(method, temperature, tuple(config["tree_shape"]), config.get("tree_nodes"), branches, descends)
    return Key(method, temperature, (config["gamma"],))


def read_acceptance(files: Sequence[Path]) -> dict[Key, float]:
    """Tokens per round by key, from the `summary.json` of one experiment or of evaluations of one pair.

    Evaluations (`inference_long-bench.py`) with the same key are pooled, so that every round has the same weight. An
    experiment's figures come without the number of rounds, so they cannot be pooled with other files. Raises UserError
    for that, for several pairs, and for files of neither kind.
    """
    tokens: dict[Key, float] = defaultdict(float)
    rounds: dict[Key, int] = defaultdict(int)
    sources = set()
    for path in files:
        source, runs = _read(path)
        sources.add(source)
        for run, run_tokens, run_rounds in runs:
            tokens[run] += run_tokens
            rounds[run] += run_rounds
    if len(sources) > 1:
        raise UserError(
            f"--acceptance: give one experiment, or evaluations of one pair, not {' and '.join(sorted(sources))}"
        )
    return {run: tokens[run] / rounds[run] for run in rounds if rounds[run]}


def _read(path: Path) -> tuple[str, list[tuple[Key, float, int]]]:
    """The experiment or pair that a file belongs to; key, tokens and rounds of its runs. Raises UserError."""
    try:
        summary = json.loads(path.read_text())
        if "tables" in summary:
            return f"the experiment {path}", [(run, length, 1) for run, length in _overall(summary)]
        config = summary["config"]
        run = key(summary["method"], config), float(summary["decoded_tokens"]), int(summary["rounds"])
        return f"evaluations of {summary['model']} with draft {config['draft']}", [run]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(
            f"--acceptance {path}: not the summary.json of an evaluation or an experiment ({error!r}); give a file "
            "that inference_long-bench.py or `longspec draft` wrote"
        ) from error


def _overall(summary: Mapping[str, Any]) -> Iterator[tuple[Key, float]]:
    """Tokens per round of an experiment's methods at each temperature, over the outputs without loops of all tasks."""
    rows = [row for row in summary["tables"]["Methods"] if row["task"] == "all"]
    figures = {(row["method"], row["T"]): row["tokens per round"] for row in rows}
    for method in summary["settings"]["evaluation"]["methods"]:
        for temperature in method["temperatures"]:
            # Text such as "4.04 ± 0.09"; "-" if no round was measured.
            figure = figures.get((method["name"], temperature), "-")
            if figure != "-":
                config = method | {"temperature": temperature}
                yield key(method["method"] or method["name"], config), float(figure.split()[0])
