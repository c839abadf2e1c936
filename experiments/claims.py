"""Verdicts on the measurements: the goals set for this pair, and the claims of the paper."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from omegaconf import MISSING

from longspec.errors import UserError
from longspec.pipeline.samples import KEY, NOTHING, Figure, Samples, context_name, speed_ratio
from longspec.pipeline.settings import TASKS

PAPER = {
    "lcc": ((3.28, 4.21), (1.57, 2.65)),
    "repobench-p": ((3.39, 4.46), (1.69, 3.26)),
    "qmsum": ((2.76, 3.15), (1.48, 2.37)),
}
"""Per task, the ranges of tokens per round and of speedup over the paper's five target models at T = 0."""

DECIMALS_BELOW = 100
"""Figures from this value on, such as tokens/s, are shown without decimals."""
NOISE = 0.02
"""Smallest relative difference of two drafts that counts, about twice the standard deviation between two seeds."""
CONTEXTS = "longest over shortest context"
FIGURES = ("tokens per round", "tokens/s", "tokens/s over vanilla", "tokens/s over lookup", CONTEXTS)
"""Figures that may have goals. CONTEXTS compares the tree's tokens per round."""
UNCHANGED = "short"
"""Name of the arm that the others change."""


@dataclass
class Goal:
    """The least value that a figure of the evaluation should have, on outputs without loops."""

    figure: str = MISSING
    """One of FIGURES."""
    least: float = MISSING
    method: str = "tree"
    """Name of a method in evaluation.methods. Without samples, a goal is not measured."""
    temperature: float = 0.0
    tasks: list[str] = field(default_factory=list)
    """Tasks whose samples are pooled; empty for all."""
    contexts: list[int] = field(default_factory=list)
    """Prompt lengths whose samples are pooled; empty for all."""
    each: list[str] = field(default_factory=list)
    """Columns, task or context: every combination of their values should have the least value; empty pools all."""


def check_goal(goal: Goal, key: str) -> None:
    """Raise UserError for an unknown figure, task or column. key: the goal's, for the message."""
    for names, known in (([goal.figure], FIGURES), (goal.tasks, TASKS), (goal.each, ("task", "context"))):
        if unknown := sorted(set(names) - set(known)):
            raise UserError(f"config key {key}: no {unknown[0]}; use {', '.join(known)}")


class Verdict(NamedTuple):
    """One row of a table of verdicts."""

    claim: str
    expected: str
    measured: str
    verdict: str
    """"reached", "missed", "holds", "does not hold", "no difference" or "not measured"."""


def goal_verdict(samples: Samples, goal: Goal) -> Verdict:
    """Whether a goal is reached. For a goal of each task or context, the lowest figure is measured."""
    columns: dict[str, Any] = {"task": tuple(goal.tasks) or None, "context": tuple(goal.contexts) or None}
    decoded = samples.of(goal.method, goal.temperature, loops=True, **columns)
    groups = decoded[goal.each].drop_duplicates().to_dict("records") if goal.each else [{}]
    figures = [(_figure(samples, goal, **columns | group), group) for group in groups]
    measured = [pair for pair in figures if pair[0].samples]
    lowest, group = min(measured, key=lambda pair: pair[0].value, default=(NOTHING, {}))

    if goal.figure == CONTEXTS:
        name = f"tokens per round, {length_ratio(samples)[1]}"
    else:
        where = [*goal.tasks, *map(context_name, goal.contexts)]
        where += ["each " + " and ".join(goal.each)] if goal.each else []
        name = f"{goal.figure}, {goal.method}, T = {goal.temperature:g}, {', '.join(where) or 'all tasks'}"
    text = lowest.text(2 if lowest.value < DECIMALS_BELOW else 0)
    if group:
        text += f" ({', '.join(map(str, group.values()))}; the lowest of {len(measured)})"
    verdict = "not measured" if not lowest.samples else "reached" if lowest.value >= goal.least else "missed"
    return Verdict(name, f"at least {goal.least:g}", text, verdict)


def _figure(samples: Samples, goal: Goal, **columns: Any) -> Figure:
    """The figure of a goal on the samples with these values of columns."""
    if goal.figure == CONTEXTS:
        return length_ratio(samples)[0]
    if goal.figure == "tokens per round":
        return samples.tokens_per_round(goal.method, goal.temperature, **columns)
    if goal.figure == "tokens/s":
        return samples.tokens_per_second(goal.method, goal.temperature, **columns)
    return samples.speed_up(goal.method, goal.figure.removeprefix("tokens/s over "), goal.temperature, **columns)


def length_ratio(samples: Samples) -> tuple[Figure, str]:
    """The tree's tokens per round at the longest context divided by those at the shortest, and this ratio's name.

    The ratio is that of the same answers, teacher-forced, if they were measured. Otherwise it compares different
    prompts of the tasks that have samples at both contexts. Context 0, the bare question, does not count.
    """
    if len(samples.forced):
        shortest, longest = samples.forced["length"].min(), samples.forced["length"].max()
        same = speed_ratio(samples.read(longest), samples.read(shortest), seconds="rounds")
        return same, f"{longest} over {shortest} tokens, the same text"
    if len(samples.contexts) < 2:
        return NOTHING, ""

    first, last = samples.contexts[0], samples.contexts[-1]
    both = set(samples.of("tree", context=first)["task"]) & set(samples.of("tree", context=last)["task"])
    short, long = (samples.tokens_per_round("tree", context=one, task=tuple(both)) for one in (first, last))
    # The relative errors of two independent figures add in squares.
    ratio = long.value / short.value
    error = ratio * ((long.error / long.value) ** 2 + (short.error / short.value) ** 2) ** 0.5
    return Figure(ratio, error, long.samples), f"{last} over {first} tokens"


def paper_claims(samples: Samples, arms: dict[str, float]) -> list[Verdict]:
    """The claims of the paper next to the measurements on this pair. arms: see `__main__.arm_figures`."""
    rows = []
    for task, ((least, most), (slowest, fastest)) in PAPER.items():
        length = samples.tokens_per_round("tree", task=task)
        rows.append(_holds(f"Tokens per round, {task}", f"{least} to {most}", length, least))
        speedup = samples.speed_up("tree", "vanilla", task=task)
        rows.append(_holds(f"Speedup, {task}", f"{slowest} to {fastest} x", speedup, slowest))

    ratio, contexts = length_ratio(samples)
    rows.append(_holds(f"Tokens per round at {contexts or 'the longest context'}", "3.97 / 4.01", ratio, 0.95))
    aime = samples.speed_up("tree", "vanilla", task="aime24")
    rows.append(_holds("Speedup on AIME24 (QwQ-32B in the paper)", "2.25 x", aime, 1.0))
    for other, expected in (("magicdec", "0.7 to 1.35 x vanilla"), ("lookup", "0.85 to 2.1 x vanilla")):
        figure = samples.speed_up("tree", other)
        rows.append(_holds(f"The tree is faster than {other} ({expected})", "more than 1 x", figure, 1.0))
    sampled = samples.speed_up("tree", "vanilla", 1.0)
    rows.append(_holds("Speedup at T = 1", "no comparable figure", sampled, 1.0))
    rows.append(_lossless(samples))

    rows.append(_arm(arms, "block-attention", "Noisy training lengthens acceptance", "+14.7%"))
    rows.append(_arm(arms, "no-anchor-offset", "Anchor-offset positions help", "same loss 3.9 x sooner"))
    return rows


def _holds(claim: str, expected: str, figure: Figure, least: float) -> Verdict:
    verdict = "not measured" if not figure.samples else "holds" if figure.value >= least else "does not hold"
    return Verdict(claim, expected, str(figure), verdict)


def _lossless(samples: Samples) -> Verdict:
    """Compare greedy outputs with vanilla's. In half precision, rounding decides near-ties, so some may differ."""
    both = samples.of("tree", loops=True).merge(samples.of("vanilla", loops=True), on=KEY, suffixes=("", "_other"))
    if both.empty:
        return Verdict("Greedy output equals vanilla's", "yes", "-", "not measured")
    same = sum(one == other for one, other in zip(both["token_ids"], both["token_ids_other"], strict=True))
    verdict = "holds" if same == len(both) else "ties in half precision differ"
    return Verdict("Greedy output equals vanilla's", "yes", f"{same} of {len(both)} outputs", verdict)


def _arm(arms: dict[str, float], arm: str, claim: str, expected: str) -> Verdict:
    """Teacher-forced acceptance with and without an arm's change.

    The trainer's own evaluation is not comparable between variants: its chains are as deep as the variant trains.
    """
    if arm not in arms or UNCHANGED not in arms:
        return Verdict(claim, expected, "-", "not measured")
    without, full = arms[arm], arms[UNCHANGED]
    gain = full / without - 1
    measured = f"{without:.2f} to {full:.2f} tokens per round ({gain:+.1%}), teacher-forced"
    verdict = "no difference" if abs(gain) < NOISE else "holds" if gain > 0 else "does not hold"
    return Verdict(claim, expected, measured, verdict)
