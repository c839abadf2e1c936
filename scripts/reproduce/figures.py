"""The report's pictures, in the demo's colours, readable at the width of a README."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator

from benchmarks.picture import draw_rounds
from scripts.demo.figure import COLOURS, STYLE

SIZE = (8.5, 4.4)
METHOD_COLOURS = COLOURS | {"lookup": "#5b8e7d", "tree-auto": "#8c1c3a", "tree-descend": "#e3929d"}
OTHERS = "#c5c8d0"
STRAIGHT = "outputs that do not loop"
LINES = ("#d1495b", "#4c9be8", "#edae49", "#5b8e7d", "#6b5b95", "#8a8f98", "#a13a49", "#2b2d42")


@contextmanager
def picture(path: Path, size: tuple[float, float] = SIZE, columns: int = 1) -> Iterator[Any]:
    """Axes of a figure that is written to `path` afterwards."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, columns, figsize=size, constrained_layout=True)
        yield axes
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=130)
        plt.close(figure)


def draw_report(folder: Path, summary: Mapping[str, Any]) -> dict[str, str]:
    """The pictures for which there are figures: title by file name."""
    methods = summary["methods"]
    drafted = [row for row in methods if row["name"] != "vanilla" and row["all"]["acceptance_length"]]
    pictures = {"speed.png": "Tokens/s by method"}
    draw_speed(methods, folder / "speed.png")
    if drafted:
        draw_by_context(drafted, folder / "acceptance_by_context.png")
        draw_by_depth(drafted, folder / "acceptance_by_depth.png")
        pictures["acceptance_by_context.png"] = "Acceptance length by context"
        pictures["acceptance_by_depth.png"] = "Acceptance by depth"
    training = summary["target_training"]
    curves = {
        name: [(line["step"], line[field]) for line in training if line.get(field) is not None]
        for name, field in (("training", "loss"), ("held out", "held_out_loss"))
    }
    if curves := {name: curve for name, curve in curves.items() if curve}:
        draw_losses(curves, "Training the target", folder / "loss_target.png")
        pictures["loss_target.png"] = "Loss of the target"
    if summary["draft_losses"]:
        draw_losses(summary["draft_losses"], "Training the draft", folder / "loss_draft.png")
        pictures["loss_draft.png"] = "Loss of the draft, stage by stage"
    if parts := summary["rounds"].get("parts"):
        draw_rounds([SimpleNamespace(**row) for row in parts], folder / "round.png")
        pictures["round.png"] = "A tree round's time by part"
    if attention := summary["rounds"].get("attention"):
        draw_attention(attention, folder / "attention.png")
        pictures["attention.png"] = "Attention of a verification"
    return pictures


def draw_by_context(methods: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Acceptance length of outputs that do not loop, over contexts; lines are broken at T = 1, bars standard errors."""
    with picture(path) as axes:
        for row in methods:
            points = [
                (context, group["acceptance_length_without_loops"])
                for context, group in row["by_context"].items()
                if group and group["acceptance_length_without_loops"]
            ]
            axes.errorbar(
                [int(context) for context, _ in points],
                [figure["value"] for _, figure in points],
                [figure["error"] or 0.0 for _, figure in points],
                color=METHOD_COLOURS.get(row["name"], OTHERS),
                linestyle="-" if row["temperature"] == 0 else "--",
                marker="o",
                capsize=3,
                label=f"{row['name']}, T = {row['temperature']:g}",
            )
        contexts_below(axes, [int(context) for row in methods for context in row["by_context"]])
        axes.set(title="Acceptance length by context", ylabel=f"tokens a round, {STRAIGHT}")
        axes.set_ylim(bottom=1)
        axes.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1.0, 0.5))


def contexts_below(axes: Axes, contexts: Sequence[int]) -> None:
    """Every doubling of the context as wide as the next."""
    ticks = sorted(set(contexts))
    axes.set_xscale("log", base=2)
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks])
    axes.set_xlabel("tokens of context")


def draw_by_depth(methods: Sequence[Mapping[str, Any]], path: Path) -> None:
    """The share of rounds in which at least d draft tokens were accepted, of outputs that do not loop."""
    with picture(path) as axes:
        for row in methods:
            shares = [100 * share for share in row["all"]["acceptance_by_depth"]]
            axes.plot(
                range(1, len(shares) + 1),
                shares,
                color=METHOD_COLOURS.get(row["name"], OTHERS),
                linestyle="-" if row["temperature"] == 0 else "--",
                marker="o",
                label=f"{row['name']}, T = {row['temperature']:g}",
            )
        axes.set(
            title="Acceptance by depth", xlabel="at least this many draft tokens", ylabel=f"% of rounds, {STRAIGHT}"
        )
        axes.set_ylim(0, 102)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(frameon=False, fontsize=8, ncols=2)


def draw_speed(methods: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Tokens a second of outputs that do not loop, by method: T = 0 on the left, T = 1 on the right."""
    with picture(path, (11.5, 4.8), columns=2) as both:
        for axes, temperature in zip(both, (0.0, 1.0), strict=True):
            speeds = {
                row["name"]: speed
                for row in methods
                if row["temperature"] == temperature and (speed := row["all"]["tokens_per_second_without_loops"])
            }
            spread_bars(axes, speeds)
            axes.set(title=f"Decoding speed, T = {temperature:g}", xlabel=f"tokens/s, {STRAIGHT}")


def spread_bars(axes: Axes, figures: Mapping[str, Mapping[str, Any]], colour: str = OTHERS) -> None:
    """One bar a name, with its spread; names that are no method of ours are in `colour`."""
    names, values = list(figures), [figure["value"] for figure in figures.values()]
    drawn = axes.barh(
        names,
        values,
        xerr=[figure["error"] or 0.0 for figure in figures.values()],
        color=[METHOD_COLOURS.get(name, colour) for name in names],
        height=0.65,
    )
    axes.bar_label(drawn, [f"{value:.0f}" if value >= 10 else f"{value:.2f}" for value in values], padding=4)
    axes.set_xlim(0, 1.2 * max(values, default=1.0))
    axes.invert_yaxis()


def draw_losses(curves: Mapping[str, Sequence[tuple[float, float]]], title: str, path: Path) -> None:
    """Losses, one line a name."""
    with picture(path) as axes:
        for (name, curve), colour in zip(curves.items(), LINES * len(curves), strict=False):
            axes.plot(*zip(*curve, strict=True), color=colour, linewidth=1.8, label=name)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("")
        axes.set(title=title, xlabel="step", ylabel="loss, nats")
        axes.legend(frameon=False, fontsize=8)


def draw_attention(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A verification's attention, all layers, by context."""
    with picture(path) as axes:
        contexts = [row["context"] for row in rows]
        axes.plot(contexts, [row["dense_ms"] for row in rows], color=OTHERS, marker="o", label="dense mask")
        if all(row["hybrid_ms"] is not None for row in rows):
            hybrid = [row["hybrid_ms"] for row in rows]
            axes.plot(contexts, hybrid, color=COLOURS["tree"], marker="o", label=f"hybrid ({rows[0]['backend']})")
        contexts_below(axes, contexts)
        axes.set(title="Attention of a verification, all layers", ylabel="ms")
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)


def draw_ablation(found: Mapping[str, Any], path: Path) -> None:
    """Acceptance length and speed of the tree, T = 0, on outputs that do not loop, one bar an arm; an arm that the time
    did not reach has none."""
    trees = {
        arm: row["all"]
        for arm, result in found["arms"].items()
        for row in result["methods"]
        if row["name"] != "vanilla" and row["temperature"] == 0
    }
    lengths = {arm: figures["acceptance_length_without_loops"] for arm, figures in trees.items()}
    speeds = {arm: figures["tokens_per_second_without_loops"] for arm, figures in trees.items()}
    with picture(path, (11.5, 1.6 + 0.45 * len(trees)), columns=2) as (left, right):
        spread_bars(left, {arm: figure for arm, figure in lengths.items() if figure}, COLOURS["tree"])
        left.set(title=f"Acceptance length: {found['name']}", xlabel=f"tokens a round, {STRAIGHT}")
        spread_bars(right, {arm: figure for arm, figure in speeds.items() if figure}, COLOURS["tree"])
        right.set(title="Decoding speed", xlabel=f"tokens/s, {STRAIGHT}")
