"""Floors of cards that were not measured: arithmetic on the figures of their data sheets.

`python -m benchmarks.cards` prints them as a Markdown table. A card does not reach the figures of its data sheet (an
H200 read 4.57 of 4.8 TB/s), so compare them only with one another, not with a measured floor.
"""

import argparse

from benchmarks.ceilings import Ceilings
from benchmarks.floors import round_floor_ms
from benchmarks.shapes import SHAPES
from benchmarks.tables import table

DATA_SHEETS = {
    "A100 80GB SXM": (2.039e12, 312e12),
    "L40S": (0.864e12, 362e12),
    "H100 SXM": (3.35e12, 989e12),
    "H200": (4.8e12, 989e12),
    "B200": (8.0e12, 2250e12),
}
"""Memory bandwidth in bytes/s and rate of dense bf16 products in FLOP/s."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="llama3-8b", choices=list(SHAPES))
    parser.add_argument("--contexts", type=int, nargs="*", default=[4096, 32768, 131072])
    parser.add_argument("--tree_shape", type=int, nargs="+", default=[4, 16, 16, 16, 16])
    print(cards_table(**vars(parser.parse_args())))


def cards_table(shape: str, contexts: list[int], tree_shape: list[int]) -> str:
    """Floors of a vanilla step and of a tree round in milliseconds, batch 1."""
    rows = []
    for card, (bytes_per_s, flops_per_s) in DATA_SHEETS.items():
        ceilings = Ceilings(bytes_per_s, flops_per_s)
        for context in contexts:
            vanilla = round_floor_ms(SHAPES[shape], ceilings, [context], (), "glide")
            tree = round_floor_ms(SHAPES[shape], ceilings, [context], tree_shape, "glide")
            rows.append({"card, arithmetic": card, "context": context, "vanilla, ms": vanilla, "tree, ms": tree})
    return table(rows, {"card, arithmetic": "", "context": "", "vanilla, ms": ".2f", "tree, ms": ".2f"})


if __name__ == "__main__":
    main()
