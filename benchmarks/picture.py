"""The parts of a round as bars."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw_rounds(rows: Sequence[Any], path: Path) -> None:
    """Write a PNG with one bar per row and the row's floor as a line.

    rows: objects with `shape`, `context`, `batch`, `parts` (milliseconds by name) and `floor_ms`. Parts that are
    differences of two measurements can be negative; these are not drawn.
    """
    figure, axes = plt.subplots(figsize=(2 + 1.3 * len(rows), 4.5), layout="constrained")
    names = [f"{row.shape}\n{row.context // 1024}k" + (f", batch {row.batch}" if row.batch > 1 else "") for row in rows]

    bottom = [0.0] * len(rows)
    for part in rows[0].parts:
        heights = [max(0.0, row.parts[part]) for row in rows]
        axes.bar(names, heights, bottom=bottom, label=part, width=0.6)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]

    for column, row in enumerate(rows):
        label = "floor" if column == 0 else "_nolegend_"
        axes.hlines(row.floor_ms, column - 0.35, column + 0.35, colors="black", label=label)

    axes.set_ylabel("ms per round")
    axes.set_title("Time of a tree round by part")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
