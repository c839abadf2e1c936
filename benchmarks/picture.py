"""Where the time of a round goes, as stacked bars."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw_rounds(rows: Sequence[Any], path: Path) -> None:
    """One bar a row (with `shape`, `context`, `batch`, `parts` in ms, `floor_ms`), its floor as a line; PNG.

    A part below 0, as a difference of two measurements can be, is not drawn.
    """
    figure, axes = plt.subplots(figsize=(2 + 1.3 * len(rows), 4.5), layout="constrained")
    names = [f"{row.shape}\n{row.context // 1024}k" + (f", batch {row.batch}" if row.batch > 1 else "") for row in rows]
    bottom = [0.0] * len(rows)
    for part in rows[0].parts:
        heights = [max(0.0, row.parts[part]) for row in rows]
        axes.bar(names, heights, bottom=bottom, label=part, width=0.6)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    for place, row in enumerate(rows):
        axes.hlines(
            row.floor_ms, place - 0.35, place + 0.35, colors="black", label="floor" if place == 0 else "_nolegend_"
        )
    axes.set_ylabel("ms a round")
    axes.set_title("A tree round")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
