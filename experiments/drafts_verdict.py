"""The summary on top of the page of `experiments.drafts`: what is missing, and which draft leads at each context."""

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pandas

from experiments.comparison import (
    Comparison,
    arm_folder,
    baseline_settings,
    baselines_folder,
    decoded_arms,
    find_trained,
    runs,
    with_methods,
)
from longspec.models.draft_layer import GLIDE
from longspec.pipeline.cells import cells, grid
from longspec.pipeline.evaluation import missing_samples
from longspec.pipeline.samples import Figure, pooled, prompt_names, speed_ratio
from longspec.pipeline.settings import Settings

ROUNDS, SPEED = ("decoded_tokens", "rounds"), ("decoded_tokens", "decode_s")
"""Columns whose sums have the ratios tokens per round and tokens/s."""
CLEAR = 2
"""Errors by which a draft must be ahead of another one."""
MOST_NAMED = 4
"""Largest number of drafts that are named next to the one ahead."""


def over_runs(lines: pandas.DataFrame, top: str, bottom: str) -> Figure:
    """The ratio of two columns' sums. Its error has two parts, added in quadrature: over prompts and over seeds."""
    whole = pooled([lines[top], lines[bottom]], prompt_names(lines))
    return whole._replace(error=whole.value * math.hypot(whole.error / whole.value, seed_error(lines, top, bottom)))


def seed_error(lines: pandas.DataFrame, top: str, bottom: str) -> float:
    """The standard error over seeds of the ratio of two columns' sums, relative to it; 0 for a single seed."""
    sums = lines.groupby("run")[[top, bottom]].sum()
    ratios = sums[top] / sums[bottom]
    return float(ratios.std() / ratios.mean() / math.sqrt(len(ratios))) if len(ratios) > 1 else 0.0


def relative(lines: pandas.DataFrame, others: pandas.DataFrame, top: str, bottom: str) -> Figure:
    """The ratio of `over_runs` of two drafts or contexts, on the prompts that both have."""
    ratio = speed_ratio(lines, others, top, bottom)
    errors = ratio.error / ratio.value, seed_error(lines, top, bottom), seed_error(others, top, bottom)
    return ratio._replace(error=ratio.value * math.hypot(*errors))


def ahead(lines: pandas.DataFrame, by: str, top: str, bottom: str, digits: int) -> str:
    """The value of column `by` with the largest ratio of two columns' sums, and those that it is not clearly ahead of;
    "-" if there are no two to compare."""
    groups = {str(name): own for name, own in lines.groupby(by, sort=False) if own[bottom].sum()}
    if len(groups) < 2:
        return "-"
    figures = {name: over_runs(own, top, bottom) for name, own in groups.items()}
    best = max(figures, key=lambda name: figures[name].value)
    level = []
    for name, own in groups.items():
        ratio = relative(groups[best], own, top, bottom)
        if name != best and not ratio.value - CLEAR * ratio.error > 1:
            level.append(name)
    names = ", ".join(level) if len(level) <= MOST_NAMED else f"{len(level)} others"
    within = f" (within {CLEAR} errors: {names})" if level else ""
    return f"{best} {figures[best].text(digits)}{within}"


def against_glide(comparison: Comparison, lines: pandas.DataFrame) -> Iterator[str]:
    """At each context, whether the best draft of another architecture is ahead of the best one of GLIDE. Arms with the
    seconds of another one do not count."""
    kinds = {name: arm.architecture == GLIDE for name, arm in comparison.arms.items() if arm.seconds_of is None}
    for context, own in lines.groupby("read"):
        drafts = {str(name): group for name, group in own.groupby("arm") if name in kinds}
        rates = {name: over_runs(group, *ROUNDS).value for name, group in drafts.items()}
        best = {kinds[name]: name for name in sorted(rates, key=rates.__getitem__)}
        if len(best) == 2:
            ratio = relative(drafts[best[False]], drafts[best[True]], *ROUNDS)
            place = "ahead of" if ratio.value > 1 else "behind"
            place = place if abs(ratio.value - 1) > CLEAR * ratio.error else "level with"
            yield f"at {context} tokens, {best[False]} is **{place}** {best[True]} ({ratio} x)"


def opening(comparison: Comparison, forced: pandas.DataFrame, decoded: pandas.DataFrame) -> Iterator[str]:
    """Which draft is ahead at each context, in tokens per round and in tokens/s. The lines are those of
    `drafts_page.all_lines` without loops."""
    for shape, lines in forced.groupby("shape", sort=False):
        if parts := list(against_glide(comparison, lines)):
            yield f"Tokens per round against GLIDE's best draft, same text, T = 0, {shape}: {'; '.join(parts)}."
    for shape, lines in forced.groupby("shape", sort=False):
        leaders = [f"{context} tokens: {ahead(own, 'arm', *ROUNDS, 2)}" for context, own in lines.groupby("read")]
        yield f"Most tokens per round on the same text, T = 0, {shape}. {'; '.join(leaders)}."
    for temperature, lines in decoded.groupby("temperature"):
        leaders = [f"{context} tokens: {ahead(own, 'label', *SPEED, 0)}" for context, own in lines.groupby("context")]
        yield f"Most tokens/s in decoding, T = {temperature:g}. {'; '.join(leaders)}."
    for name, arm in comparison.arms.items():
        ratios = []
        for (shape, context), lines in forced.groupby(["shape", "read"]):
            own, other = (lines[lines["arm"] == one] for one in (name, arm.seconds_of))
            if len(own) and len(other):
                ratios.append(f"{relative(own, other, *ROUNDS)} ({shape}, {context} tokens)")
        if ratios:
            yield f"Tokens per round of {name} over {arm.seconds_of}, equal GPU seconds, T = 0: {', '.join(ratios)}."


def gaps(settings: Settings, comparison: Comparison, root: Path, seeds: Sequence[int]) -> str:
    """What a run with these seeds lacks; empty if nothing."""
    lacks: dict[str, list[str]] = {"Not trained": [], "No teacher-forced acceptance": [], "Not decoded": []}
    untrained, unforced, undecoded = lacks.values()
    for number, (seed, names) in enumerate(runs(comparison, comparison.arms, seeds)):
        for name in names:
            label, folder = f"{name} (seed {seed})", arm_folder(root, name, seed)
            if (own := find_trained(settings, comparison, root, name, seed)) is None:
                untrained.append(label)
                continue
            if missing_samples(with_methods(own, comparison.forced), folder):
                unforced.append(label)
            is_decoded = number == 0 and name in decoded_arms(comparison, names)
            if is_decoded and missing_samples(with_methods(own, comparison.decoding), folder):
                undecoded.append(label)
    if missing := missing_samples(baseline_settings(settings, comparison), baselines_folder(root)):
        undecoded.append(f"{missing} samples of the baselines")
    lacks["Too few prompts"] = list(few_prompts(settings, comparison, root))
    return " ".join(f"{title}: {', '.join(names)}." for title, names in lacks.items() if names)


def few_prompts(settings: Settings, comparison: Comparison, root: Path) -> Iterator[str]:
    """The tasks and contexts with fewer prompts than the methods ask for."""
    methods = [*comparison.baselines, *comparison.forced, *comparison.decoding]
    evaluation = with_methods(settings, methods).evaluation
    asked, found = Counter[tuple[str, int]](), Counter[tuple[str, int]]()
    for task, context, method in grid(evaluation):
        number = evaluation.tasks[task].prompts or method.prompts
        asked[task, context] = max(asked[task, context], number)
    for cell in cells(evaluation, root):
        found[cell.task, cell.context] = max(found[cell.task, cell.context], len(cell.prompts))
    for (task, context), number in asked.items():
        if found[task, context] < number:
            yield f"{task} at {context} tokens ({found[task, context]} of {number})"
