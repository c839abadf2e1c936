"""The picture of a comparison (`longspec.cli.comparison`). Imports matplotlib."""

from pathlib import Path
from typing import Any

import matplotlib

from longspec.errors import os_errors

matplotlib.use("Agg")  # draws without a display
from matplotlib import pyplot

COLORS = {"vanilla": "#999999", "lookup": "#e69f00", "tree": "#56b4e9", "auto": "#0072b2"}


def draw(summary: dict[str, Any], path: Path) -> None:
    """Draw tokens per second as bars in a PNG. Raises UserError for a path that cannot be written."""
    speeds = {label: row["tokens_per_second"] for label, row in summary["methods"].items()}
    figure, axes = pyplot.subplots(figsize=(2 + 1.2 * len(speeds), 4), layout="constrained")
    bars = axes.bar(list(speeds), list(speeds.values()), color=[COLORS[label] for label in speeds], width=0.6)
    axes.bar_label(bars, [f"{row['speedup']:.2f}x" for row in summary["methods"].values()])
    axes.set_ylabel("tokens per second")
    axes.set_title(f"{summary['model']}\n{summary['device']}", fontsize="medium")
    with os_errors(f"--png {path}: cannot be written"):
        figure.savefig(path, dpi=120, format="png")
