"""Markdown tables of the output of `benchmarks.decoding`.

`python -m benchmarks.tables FILE...` prints the tables of saved outputs, one section per device. The last line of each
FILE is the benchmark's JSON.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

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


def rounds_table(rounds: Sequence[Result]) -> str:
    """Time and floor of each round, and tokens/s where an acceptance length was measured."""
    with_speed = any(row["acceptance_length"] for row in rounds)
    header = ["shape", "context", "batch", "method", "ms", "floor", "ratio"]
    header += ["tokens per round", "tokens/s"] if with_speed else []
    rows = []
    for row in rounds:
        cells = [row["shape"], str(row["context"]), str(row["batch"]), round_name(row)]
        cells += [f"{row[name]:.2f}" for name in ("round_ms", "floor_ms", "ratio")]
        if with_speed:
            cells += [_cell(row["acceptance_length"], ".2f"), _cell(row["tokens_per_s"], ".0f")]
        rows.append(cells)
    return markdown(header, rows)


def parts_table(rounds: Sequence[Result]) -> str:
    """Milliseconds per part of each round. The parts add up to the round; a residual can be negative."""
    names = list(rounds[0]["parts"])
    rows = []
    for row in rounds:
        times = [f"{row['parts'][name]:.2f}" for name in names]
        cells = [row["shape"], str(row["context"]), str(row["batch"]), round_name(row)]
        rows.append([*cells, *times, f"{row['round_ms']:.2f}"])
    return markdown(["shape", "context", "batch", "method", *names, "round"], rows)


def round_name(row: Result) -> str:
    """The method of a round, with the settings by which rounds of one run differ."""
    name = row["method"]
    # Outputs of earlier versions have neither nodes nor columns.
    if name == "tree" and row.get("nodes"):
        name += f", {row['nodes']} nodes"
    if row.get("columns"):
        name += f", {row['columns']} columns"
    return name + (f", T = {row['temperature']:g}" if row["temperature"] else "")


def peers_table(peers: Sequence[Result]) -> str:
    """Milliseconds per token of other implementations."""
    rows = [[peer["shape"], str(peer["context"]), peer["name"], _cell(peer["ms"], ".1f")] for peer in peers]
    return markdown(["shape", "context", "implementation", "ms per token"], rows)


def markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join([markdown_header(header), *map(markdown_line, rows)])


def markdown_header(names: Sequence[str]) -> str:
    return f"{markdown_line(names)}\n{markdown_line(['---'] * len(names))}"


def markdown_line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def formatted(row: Result, forms: Mapping[str, str]) -> list[str]:
    """The entries of a row in the formats by name; – for None."""
    return [_cell(row[name], form) for name, form in forms.items()]


def _cell(value: Any, form: str) -> str:
    return "–" if value is None else format(value, form)


if __name__ == "__main__":
    main()
