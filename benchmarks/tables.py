"""Markdown tables of the output of `benchmarks.decoding`.

`python -m benchmarks.tables FILE...` prints the tables of saved outputs, one section per device. The last line of each
FILE is the benchmark's JSON.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from longspec.pipeline.files import read_jsonl
from longspec.replacing import write_atomically

Result = dict[str, Any]
"""The JSON object that the benchmark prints last."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", type=Path, nargs="+")
    for path in parser.parse_args().files:
        result = json.loads(path.read_text().splitlines()[-1])
        print(f"## {result['device']}\n\n{tables(result)}\n")


def tables(result: Result) -> str:
    """The tables of one run: rounds, their parts, and other implementations."""
    parts = [row for row in result["rounds"] if row["parts"]]
    sections = [rounds_table(result["rounds"])]
    if parts:
        sections.append(parts_table(parts))
    if result["peers"]:
        sections.append(peers_table(result["peers"]))
    return "\n\n".join(sections)


KEYS = {"shape": "", "context": "", "batch": "", "method": ""}
"""Columns that say what a round is."""


def rounds_table(rounds: Sequence[Result]) -> str:
    """Time and floor of each round, and tokens/s where an acceptance length was measured."""
    columns = {"round_ms": ("ms", ".2f"), "floor_ms": ("floor", ".2f"), "ratio": ("ratio", ".2f")}
    if any(row["acceptance_length"] for row in rounds):
        columns |= {"acceptance_length": ("tokens per round", ".2f"), "tokens_per_s": ("tokens/s", ".0f")}
    forms = KEYS | {name: form for name, (_, form) in columns.items()}
    rows = [formatted(row | {"method": round_name(row)}, forms) for row in rounds]
    return markdown([*KEYS, *(title for title, _ in columns.values())], rows)


def parts_table(rounds: Sequence[Result]) -> str:
    """Milliseconds per part of each round. The parts add up to the round; a residual can be negative."""
    forms = KEYS | dict.fromkeys([*rounds[0]["parts"], "round"], ".2f")
    rows = [row | row["parts"] | {"method": round_name(row), "round": row["round_ms"]} for row in rounds]
    return table(rows, forms)


def round_name(row: Result) -> str:
    """The method of a round, with the settings by which rounds of one run differ."""
    name = row["method"]
    if name == "tree":
        name += f", {row['nodes']} nodes"
    if row["columns"]:
        name += f", {row['columns']} columns"
    return name + (f", T = {row['temperature']:g}" if row["temperature"] else "")


def peers_table(peers: Sequence[Result]) -> str:
    """Milliseconds per token of other implementations."""
    rows = [formatted(peer, {"shape": "", "context": "", "name": "", "ms": ".1f"}) for peer in peers]
    return markdown(["shape", "context", "implementation", "ms per token"], rows)


class RowFile:
    """The rows of a benchmark in a JSONL file, so that an interrupted run does not measure them again."""

    def __init__(self, file: Path | None, run: Result) -> None:
        """file: None keeps nothing. run: the settings of all rows, as JSON; the file also keeps the rows of others."""
        self.file, self.run = file, run
        self.stored = read_jsonl(file) if file else []
        self.rows = [row for row in self.stored if row.get("run") == run]

    def add(self, row: Result) -> None:
        self.rows.append({"run": self.run} | row)
        self.stored.append(self.rows[-1])
        if self.file:
            write_atomically(self.file, "".join(json.dumps(stored) + "\n" for stored in self.stored))


def print_result(benchmark: str, options: argparse.Namespace, **results: Any) -> None:
    """Print the last line of a benchmark: its name, options and results as JSON."""
    print(json.dumps({"benchmark": benchmark, "config": vars(options), **results}, default=str), flush=True)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (header, ["---"] * len(header), *rows))


def table(rows: Sequence[Result], forms: Mapping[str, str]) -> str:
    """The entries of rows in the formats by name, a column per name."""
    return markdown(list(forms), [formatted(row, forms) for row in rows])


def formatted(row: Result, forms: Mapping[str, str]) -> list[str]:
    """The entries of a row in the formats by name; – for None."""
    return ["–" if row[name] is None else format(row[name], form) for name, form in forms.items()]


if __name__ == "__main__":
    main()
