"""`report.png`: how the stages trained, how deep the drafts are accepted, and how fast each method is."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from scripts.demo.evaluate import METHODS, UNTRAINED

FORCED = "forced"
NAMES = (*METHODS, UNTRAINED)
LABELS = {method: method for method in METHODS} | {UNTRAINED: "tree,\nuntrained", FORCED: "tree,\nreal text"}
COLOURS = {
    "vanilla": "#8a8f98",
    "seq": "#4c9be8",
    "tree": "#d1495b",
    "magicdec": "#edae49",
    UNTRAINED: "#e3b1b8",
    FORCED: "#a13a49",
}
STAGES = ("1", "2", "3")
INK = "#2b2d42"
STYLE: Any = {
    "font.size": 10,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": "#c5c8d0",
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
}


def draw(summary: dict[str, Any], path: Path) -> None:
    """Write the figure of a summary."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(2, 2, figsize=(11.5, 7.5), constrained_layout=True)
        training(axes[0, 0], summary["stages"])
        depths(axes[0, 1], summary["methods"])
        lengths = {name: summary["methods"][name]["acceptance_length"] for name in NAMES}
        lengths[FORCED] = summary["teacher_forced_acceptance"]
        bars(axes[1, 0], lengths, "{:.2f}")
        axes[1, 0].set(title="Acceptance length", ylabel="tokens a round")
        bars(axes[1, 1], {name: summary["methods"][name]["tokens_per_second"] for name in NAMES}, "{:.0f}")
        axes[1, 1].set(title="Decoding speed", ylabel="tokens/s")
        figure.suptitle(
            f"LongSpec demo, {summary['family']} target: {summary['target_bits_per_byte']:.2f} bits per held-out byte "
            f"(a bigram: {summary['bigram_bits_per_byte']:.2f})",
            fontsize=13,
            x=0.01,
            ha="left",
        )
        figure.savefig(path, dpi=130)
        plt.close(figure)


def training(axes: Axes, stages: list[list[dict[str, float]]]) -> None:
    """The loss of the three stages, one after the other."""
    start = 0.0
    for number, (lines, name) in enumerate(zip(stages, STAGES, strict=True)):
        steps = [start + line["step"] for line in lines]
        losses = [line["loss"] for line in lines]
        axes.axvspan(start + 0.5, steps[-1] + 0.5, color="#f3f4f7" if number % 2 == 0 else "#ffffff", linewidth=0)
        axes.plot(steps, losses, color=COLOURS["tree"], alpha=0.25, linewidth=1)
        axes.plot(steps, smoothed(losses), color=COLOURS["tree"], linewidth=1.8)
        axes.text(
            (start + steps[-1]) / 2, 0.97, name, transform=axes.get_xaxis_transform(), ha="center", va="top", size=8
        )
        start = steps[-1]
    axes.set(
        title="Draft training: short text, long text, answers",
        xlabel="step",
        ylabel="KL from the target, nats",
        xlim=(0.5, start + 0.5),
    )
    axes.set_ylim(bottom=0)


def smoothed(values: list[float], share: float = 0.85) -> list[float]:
    """An exponential mean that starts at the first value."""
    means = [values[0]]
    for value in values[1:]:
        means.append(share * means[-1] + (1 - share) * value)
    return means


def depths(axes: Axes, methods: dict[str, Any]) -> None:
    """The share of rounds in which at least d draft tokens were accepted."""
    for name in ("tree", "seq", "magicdec", UNTRAINED):
        figures = methods[name]
        shares = [100 * count / figures["rounds"] for count in figures["accepted_by_depth"]]
        depth = range(1, len(shares) + 1)
        axes.plot(depth, shares, marker="o", color=COLOURS[name], label=LABELS[name].replace("\n", " "), linewidth=1.8)
    axes.set(title="Acceptance by depth", xlabel="at least this many draft tokens", ylabel="% of rounds", ylim=(0, 102))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend(frameon=False, fontsize=9)


def bars(axes: Axes, values: dict[str, float], form: str) -> None:
    """One bar a method."""
    names = [LABELS[name] for name in values]
    drawn = axes.bar(names, list(values.values()), color=[COLOURS[name] for name in values], width=0.65)
    axes.bar_label(drawn, [form.format(value) for value in values.values()], padding=3)
    axes.set_ylim(0, 1.15 * max(values.values()))
