"""Draw one round of decoding: `python docs/round.py` writes docs/round.png.

The tree is small, and its tokens are an example; the steps are those of `Engine.round`.
"""

from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

OUTPUT = Path(__file__).with_name("round.png")
INK, MUTED = "#22223b", "#6c6f7d"
TARGET, DRAFT, ACCEPTED, REJECTED, BONUS = "#c9d8ee", "#fbe3b5", "#bfe3c6", "#ececf0", "#f6c1c6"
FAINT = "#b9bac4"
SMALL = 10.5
FRAME: dict[str, Any] = {"boxstyle": "round,pad=0,rounding_size=0.08", "linewidth": 1.2}
ARROW: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": 12, "linewidth": 1.3, "shrinkA": 0, "shrinkB": 0}
LEFT, ROOT_Y = 0.9, -0.5


class Node(NamedTuple):
    """A node of the example tree."""

    token: str
    parent: int
    x: float
    y: float


ROOT = 0
TREE = (
    Node("cat", -1, 0.0, 0.0),
    Node("sat", 0, 1.15, 0.62),
    Node("is", 0, 1.15, -0.62),
    Node("on", 1, 2.3, 1.0),
    Node("by", 1, 2.3, 0.24),
    Node("a", 2, 2.3, -0.62),
    Node("the", 3, 3.45, 1.0),
    Node("her", 4, 3.45, 0.24),
)
PATH = (0, 1, 3)
"""Nodes that the target accepts, from the root down."""
PREFIX = ("The", "old")
BONUS_TOKEN = "my"


def box(ax: Axes, x: float, y: float, text: str, color: str, width: float = 0.8, edge: str = INK) -> None:
    height = 0.46
    corner = (x - width / 2, y - height / 2)
    ax.add_patch(FancyBboxPatch(corner, width, height, facecolor=color, edgecolor=edge, **FRAME))
    ax.text(x, y, text, ha="center", va="center", fontsize=11, color=INK)


def arrow(ax: Axes, start: tuple[float, float], end: tuple[float, float], color: str = INK) -> None:
    ax.add_patch(FancyArrowPatch(start, end, color=color, **ARROW))


def tree(ax: Axes, colors: dict[int, str], edges: dict[int, str]) -> None:
    for number, node in enumerate(TREE):
        color = edges.get(number, INK)
        x, y = LEFT + node.x, ROOT_Y + node.y
        if node.parent >= 0:
            parent = TREE[node.parent]
            arrow(ax, (LEFT + parent.x + 0.4, ROOT_Y + parent.y), (x - 0.4, y), color)
        box(ax, x, y, node.token, colors[number], edge=color)


def slots(ax: Axes, x: float, y: float, colors: dict[str, str]) -> None:
    """Draw slots of a KV cache by token, from left to right."""
    for number, (token, color) in enumerate(colors.items()):
        box(ax, x + 0.86 * number, y, token, color)


def panel(ax: Axes, title: str, lines: str) -> None:
    ax.set_xlim(0, 6)
    ax.set_ylim(-2.1, 2.45)
    ax.set_aspect("equal")
    ax.axis("off")
    ax.text(0.05, 2.2, title, fontsize=14, fontweight="bold", color=INK, va="center")
    ax.text(0.05, 1.9, lines, fontsize=SMALL, color=MUTED, va="top", linespacing=1.35)


def draw_draft(ax: Axes) -> None:
    panel(
        ax,
        "1. Draft",
        "The draft, one layer, proposes a tree level by level. It attends to its\n"
        "own last 512 tokens and to the last layer of the target's KV cache.",
    )
    tree(ax, dict.fromkeys(range(len(TREE)), DRAFT) | {ROOT: TARGET}, {})
    ax.text(LEFT, ROOT_Y + 0.4, "root", fontsize=SMALL, color=MUTED, ha="center")
    slots(ax, 0.7, -1.75, dict.fromkeys(PREFIX, TARGET))
    ax.text(2.1, -1.75, "target's KV cache, last layer", fontsize=SMALL, color=MUTED, va="center")
    arrow(ax, (1.13, -1.5), (1.13, -1.0), MUTED)


def draw_verify(ax: Axes) -> None:
    panel(
        ax,
        "2. Verify",
        "One forward pass of the target reads all nodes. Each node attends to\nthe whole prefix and to its ancestors.",
    )
    left, top, size = 2.6, 0.8, 0.29
    for row, node in enumerate(TREE):
        y = top - size * row
        ax.text(left - 1.75, y, node.token, fontsize=SMALL, color=INK, ha="right", va="center")
        ax.add_patch(Rectangle((left - 1.6, y - size / 2), 1.45, size, facecolor=TARGET, edgecolor="white"))
        for column in range(len(TREE)):
            color = DRAFT if column in ancestors(row) else REJECTED
            corner = (left + size * column, y - size / 2)
            ax.add_patch(Rectangle(corner, size, size, facecolor=color, edgecolor="white"))
    below = top - size * 8.2
    ax.text(left - 0.87, below, "prefix", fontsize=SMALL, color=MUTED, ha="center")
    ax.text(left + size * 4, below, "tree nodes", fontsize=SMALL, color=MUTED, ha="center")


def draw_accept(ax: Axes) -> None:
    panel(
        ax,
        "3. Accept",
        "The path that agrees with the target's own choices is kept. The target's\n"
        "choice after the last accepted node is the bonus token.",
    )
    colors = {number: ACCEPTED if number in PATH else REJECTED for number in range(len(TREE))} | {ROOT: TARGET}
    edges = {number: INK if number in PATH else FAINT for number in range(len(TREE))}
    tree(ax, colors, edges)
    last = TREE[PATH[-1]]
    x, y = LEFT + last.x, ROOT_Y + last.y
    arrow(ax, (x + 0.4, y), (x + 0.75, y + 0.6))
    box(ax, x + 1.15, y + 0.6, BONUS_TOKEN, BONUS)
    ax.text(x + 1.65, y + 0.6, "bonus token", fontsize=SMALL, color=MUTED, va="center")


def draw_compact(ax: Axes) -> None:
    panel(
        ax,
        "4. Compact",
        "In all layers, the KV entries of the accepted path move to the end of the\n"
        "prefix. The bonus token is the root of the next round.",
    )
    nodes = {number: ACCEPTED if number in PATH else REJECTED for number in range(len(TREE))}
    width, before, after = 0.56, 0.6, -0.5
    for number, token in enumerate(PREFIX):
        for y in (before, after):
            box(ax, 0.4 + width * number, y, token, TARGET, width - 0.06)
    for number, color in nodes.items():
        x = 0.4 + width * (len(PREFIX) + number)
        box(ax, x, before, TREE[number].token, color, width - 0.06, INK if number in PATH else FAINT)
    for number, node in enumerate(PATH):
        x = 0.4 + width * (len(PREFIX) + number)
        box(ax, x, after, TREE[node].token, ACCEPTED, width - 0.06)
        arrow(ax, (0.4 + width * (len(PREFIX) + node), before - 0.23), (x, after + 0.23))
    ax.text(
        0.4 + width * (len(PREFIX) + len(PATH)), after, "target's KV cache", fontsize=SMALL, color=MUTED, va="center"
    )
    box(ax, 0.4, -1.55, BONUS_TOKEN, BONUS, width - 0.06)
    emitted = ", ".join([TREE[number].token for number in PATH[1:]] + [BONUS_TOKEN])
    ax.text(0.8, -1.55, f"next root; this round emitted: {emitted}", fontsize=SMALL, color=MUTED, va="center")


def ancestors(number: int) -> set[int]:
    """A node's ancestors and itself."""
    nodes = set()
    while number >= 0:
        nodes.add(number)
        number = TREE[number].parent
    return nodes


def main() -> None:
    figure, axes = plt.subplots(2, 2, figsize=(11, 8.4), dpi=110)
    for ax, draw in zip(axes.flat, (draw_draft, draw_verify, draw_accept, draw_compact), strict=True):
        draw(ax)
    figure.subplots_adjust(left=0.01, right=0.99, top=0.99, bottom=0.01, wspace=0.02, hspace=0.02)
    figure.savefig(OUTPUT, facecolor="white")
    print(f"written to {OUTPUT}")


if __name__ == "__main__":
    main()
