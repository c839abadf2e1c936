"""The picture of `benchmarks.decoding`: the parts of a round as bars."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas

matplotlib.use("Agg")
import matplotlib.pyplot as plt


def draw_rounds(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write a PNG with one bar per row of `benchmarks.decoding` and the row's floor as a line.

    Parts that are differences of two measurements can be negative; these are not drawn.
    """
    figure, axes = plt.subplots(figsize=(2 + 1.3 * len(rows), 4.5), layout="constrained")
    batches = [f", batch {row['batch']}" if row["batch"] > 1 else "" for row in rows]
    names = [f"{row['shape']}\n{row['context'] // 1024}k{batch}" for row, batch in zip(rows, batches, strict=True)]
    heights = pandas.DataFrame([row["parts"] for row in rows], names).clip(lower=0)
    heights.plot.bar(stacked=True, width=0.6, rot=0, ax=axes)
    middle = np.arange(len(rows))
    axes.hlines([row["floor_ms"] for row in rows], middle - 0.35, middle + 0.35, colors="black", label="floor")
    axes.set(ylabel="ms per round", title="Time of a tree round by part")
    axes.legend(fontsize="small", loc="upper left", bbox_to_anchor=(1, 1))
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
