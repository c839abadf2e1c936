"""Verdicts on the measurements: the goals set for this pair, and the claims of the paper."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import pandas

from experiments.settings import RECIPE, SHORT
from experiments.tables import NOTHING, Figure, speed_ratio, tokens_per_round

CODE = ("lcc", "repobench-p")
PAPER = {
    "lcc": ((3.28, 4.21), (1.57, 2.65)),
    "repobench-p": ((3.39, 4.46), (1.69, 3.26)),
    "qmsum": ((2.76, 3.15), (1.48, 2.37)),
}
"""Per task, the ranges of tokens per round and of speedup over the paper's five target models at T = 0."""

Diagnostics = dict[str, dict[str, dict[str, float]]]
"""Figures of `diagnostics.diagnose` by draft ("ARM-SEED STAGE") and by the run of the target whose answers it read."""
NOISE = 0.02
"""Smallest relative difference of two drafts that counts, about twice the standard deviation between two seeds."""


class Verdict(NamedTuple):
    """One row of a table of verdicts."""

    claim: str
    expected: str
    measured: str
    verdict: str
    """"reached", "missed", "holds", "does not hold", "no difference" or "not measured"."""


@dataclass(frozen=True)
class Samples:
    """All samples of an evaluation."""

    frame: pandas.DataFrame

    def of(self, method: str, temperature: float = 0.0, *, loops: bool = False, **columns: Any) -> pandas.DataFrame:
        """The samples of a method at a temperature.

        loops: include outputs with repetition loops. columns: allowed value of a column, or a tuple of allowed values.
        """
        frame = self.frame
        chosen = (frame["method"] == method) & (frame["temperature"] == temperature)
        if not loops:
            chosen &= ~frame["loops"]
        for name, value in columns.items():
            chosen &= frame[name].isin(value if isinstance(value, tuple) else (value,))
        return frame[chosen]

    def speed_up(self, method: str, other: str, temperature: float = 0.0, **columns: Any) -> Figure:
        """Tokens/s of `method` divided by those of `other`, over the prompts where neither output loops."""
        return speed_ratio(self.of(method, temperature, **columns), self.of(other, temperature, **columns))

    @property
    def fastest_tree(self) -> str:
        """Method auto if it was measured, otherwise the default tree."""
        return "auto" if (self.frame["method"] == "auto").any() else "tree"

    @property
    def tasks(self) -> list[str]:
        return list(dict.fromkeys(self.frame["task"]))

    def length_ratio(self, method: str = "tree") -> tuple[Figure, str]:
        """Tokens per round at the longest context divided by those at the shortest, and the name of this ratio.

        Only tasks with samples at both contexts count. Context 0, the bare question, does not.
        """
        contexts = sorted(set(self.frame["context"]) - {0})
        if len(contexts) < 2:
            return NOTHING, ""

        short_samples = self.of(method, context=contexts[0])
        long_samples = self.of(method, context=contexts[-1])
        common = set(short_samples["task"]) & set(long_samples["task"])
        short = tokens_per_round(short_samples[short_samples["task"].isin(common)])
        long = tokens_per_round(long_samples[long_samples["task"].isin(common)])

        # The relative errors of two independent figures add in squares.
        ratio = long.value / short.value
        error = ratio * ((long.error / long.value) ** 2 + (short.error / short.value) ** 2) ** 0.5
        return Figure(ratio, error, long.samples), f"{contexts[-1]} over {contexts[0]} tokens"


def targets(samples: Samples, on_cpu: bool = False) -> list[Verdict]:
    """The goals set for this pair, on outputs without loops. The goals for speed differ between a GPU and a CPU."""
    rows = []
    goals = (("gsm8k", ("gsm8k",), 5.0), ("chat", ("chat",), 3.6), ("code", CODE, 3.6), ("qmsum", ("qmsum",), 3.0))
    for name, tasks, least in goals:
        figure = tokens_per_round(samples.of("tree", task=tasks))
        rows.append(_reached(f"Tokens per round, {name}, T = 0", least, figure))
    rows.append(_reached("Tokens per round, all tasks, T = 1", 2.9, tokens_per_round(samples.of("tree", 1.0))))
    ratio, contexts = samples.length_ratio()
    rows.append(_reached(f"Tokens per round at {contexts or 'the longest context'}", 0.95, ratio))

    tree = samples.fastest_tree
    if on_cpu:
        wall = speed_ratio(samples.of(tree), samples.of("vanilla"), "new_tokens", "wall_s")
        return [*rows, _reached(f"Tokens/s in wall-clock time, {tree} over vanilla, all tasks", 1.3, wall)]
    rows.append(_reached(f"Tokens/s, {tree} over vanilla, all tasks", 2.0, samples.speed_up(tree, "vanilla")))
    for other, least in (("vanilla", 1.5), ("lookup", 1.2)):
        for task in samples.tasks:
            figure = samples.speed_up(tree, other, task=task)
            rows.append(_reached(f"Tokens/s, {tree} over {other}, {task}", least, figure))
    return rows


def _reached(claim: str, least: float, figure: Figure) -> Verdict:
    verdict = "not measured" if not figure.samples else "reached" if figure.value >= least else "missed"
    return Verdict(claim, f"at least {least:g}", str(figure), verdict)


def paper_claims(samples: Samples, diagnostics: Diagnostics) -> list[Verdict]:
    """The claims of the paper next to the measurements on this pair."""
    rows = []
    for task, ((least, most), (slowest, fastest)) in PAPER.items():
        length = tokens_per_round(samples.of("tree", task=task))
        rows.append(_holds(f"Tokens per round, {task}", f"{least} to {most}", length, least))
        speedup = samples.speed_up("tree", "vanilla", task=task)
        rows.append(_holds(f"Speedup, {task}", f"{slowest} to {fastest} x", speedup, slowest))

    ratio, contexts = samples.length_ratio()
    rows.append(_holds(f"Tokens per round at {contexts or 'the longest context'}", "3.97 / 4.01", ratio, 0.95))
    aime = samples.speed_up("tree", "vanilla", task="aime24")
    rows.append(_holds("Speedup on AIME24 (QwQ-32B in the paper)", "2.25 x", aime, 1.0))
    for other, expected in (("magicdec", "0.7 to 1.35 x vanilla"), ("lookup", "0.85 to 2.1 x vanilla")):
        figure = samples.speed_up("tree", other)
        rows.append(_holds(f"The tree is faster than {other} ({expected})", "more than 1 x", figure, 1.0))
    sampled = samples.speed_up("tree", "vanilla", 1.0)
    rows.append(_holds("Speedup at T = 1", "no comparable figure", sampled, 1.0))
    rows.append(_lossless(samples))

    rows.append(_arm(diagnostics, "block-attention", "Noisy training lengthens acceptance", "+14.7%"))
    rows.append(_arm(diagnostics, "no-anchor-offset", "Anchor-offset positions help", "same loss 3.9 x sooner"))
    rows.append(
        Verdict("Hybrid tree attention", "49.9 to 12.5 ms per round", "see docs/performance.md", "not measured")
    )
    return rows


def _holds(claim: str, expected: str, figure: Figure, least: float) -> Verdict:
    verdict = "not measured" if not figure.samples else "holds" if figure.value >= least else "does not hold"
    return Verdict(claim, expected, str(figure), verdict)


def _lossless(samples: Samples) -> Verdict:
    """Compare greedy outputs with vanilla's. In half precision, rounding decides near-ties, so some may differ."""
    keys = ["task", "context", "id"]
    both = samples.of("tree", loops=True).merge(samples.of("vanilla", loops=True), on=keys, suffixes=("", "_other"))
    if both.empty:
        return Verdict("Greedy output equals vanilla's", "yes", "-", "not measured")
    same = sum(one == other for one, other in zip(both["token_ids"], both["token_ids_other"], strict=True))
    verdict = "holds" if same == len(both) else "ties in half precision differ"
    return Verdict("Greedy output equals vanilla's", "yes", f"{same} of {len(both)} outputs", verdict)


def _arm(diagnostics: Diagnostics, arm: str, claim: str, expected: str) -> Verdict:
    """Teacher-forced acceptance with and without an arm's change, after the arm's last stage with the same seed.

    The trainer's own evaluation is not comparable between variants: its chains are as deep as the variant trains.
    """
    name = next((name for name in reversed(diagnostics) if name.startswith(f"{arm}-")), None)
    changed = None if name is None else diagnostics[name]
    # The arm that the others change: SHORT, or the recipe in an experiment without it.
    runs = () if name is None else (name.replace(arm, other, 1) for other in (SHORT, RECIPE))
    unchanged = next((diagnostics[run] for run in runs if diagnostics.get(run)), None)
    if changed is None or unchanged is None:
        return Verdict(claim, expected, "-", "not measured")
    without, full = _pooled_tokens(changed), _pooled_tokens(unchanged)
    gain = full / without - 1
    measured = f"{without:.2f} to {full:.2f} tokens per round ({gain:+.1%}), teacher-forced"
    verdict = "no difference" if abs(gain) < NOISE else "holds" if gain > 0 else "does not hold"
    return Verdict(claim, expected, measured, verdict)


def _pooled_tokens(by_run: dict[str, dict[str, float]]) -> float:
    """Tokens per round over the answers of all runs of the target."""
    rounds = sum(figures["rounds"] for figures in by_run.values())
    return sum(figures["tokens"] * figures["rounds"] for figures in by_run.values()) / rounds
