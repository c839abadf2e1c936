"""Pictures of benchmarks: the parts of a round as bars, and the map of `auto`."""

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
    save(figure, path)


RANGES = {"over_vanilla": (0.5, 1.5), "over_best": (0.9, 1.1)}
"""Ratios at the ends of the color scale."""


def draw_map(rows: Sequence[dict[str, Any]], path: Path, title: str) -> None:
    """Write a PNG of `benchmarks.auto_map`: auto relative to vanilla and to the best fixed method, by temperature."""
    temperatures = sorted({row["temperature"] for row in rows})
    contexts, batches = list(dict.fromkeys(row["context"] for row in rows)), sorted({row["batch"] for row in rows})
    size = (2 * (2 + 0.8 * len(batches)), (1.2 + 0.5 * len(contexts)) * len(temperatures))
    figure, grid = plt.subplots(len(temperatures), 2, figsize=size, squeeze=False, layout="constrained")
    for line, temperature in zip(grid, temperatures, strict=True):
        for axes, (key, (low, high)) in zip(line, RANGES.items(), strict=True):
            values = {(row["context"], row["batch"]): row[key] for row in rows if row["temperature"] == temperature}
            shown = [[values.get((context, batch), float("nan")) for batch in batches] for context in contexts]
            axes.imshow(shown, cmap="RdYlGn", vmin=low, vmax=high, aspect="auto")
            for (context, batch), value in values.items():
                is_dark = not 0.1 < (value - low) / (high - low) < 0.9
                place, style = (batches.index(batch), contexts.index(context)), {"ha": "center", "va": "center"}
                axes.text(*place, f"{value:.2f}", color="white" if is_dark else "black", **style)
            axes.set_xticks(range(len(batches)), map(str, batches))
            axes.set_yticks(range(len(contexts)), contexts)
            axes.set_xlabel("batch")
            axes.set_title(f"auto {key.replace('_', ' ')}, T = {temperature:g}")
    figure.suptitle(title)
    save(figure, path)


def save(figure: Any, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)
