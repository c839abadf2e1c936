"""The report of a run: tables and plots of the evaluation and the training, as a Markdown page."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import pandas

from longspec.cli.picture import COLORS
from longspec.errors import UserError
from longspec.pipeline.cells import read_samples
from longspec.pipeline.evaluation import FACTS, evaluation_folder
from longspec.pipeline.induction import layer_file, layer_table
from longspec.pipeline.probes import probe_file, probe_table, read_scores
from longspec.pipeline.samples import Figure, Samples, context_name, markdown, rate, speed_ratio
from longspec.pipeline.settings import Settings
from longspec.pipeline.training import stage_table
from longspec.replacing import write_atomically

matplotlib.use("Agg")
from matplotlib import pyplot

PICTURES = ("contexts.png", "tokens_per_second.png")
MAIN_METHODS = ("vanilla", "lookup", "tree", "auto")
LEAST_OUTPUTS = 5
"""Minimum number of outputs per method for a task to appear in the summary and in the plot of tokens/s."""
Tables = dict[str, tuple[str, pandas.DataFrame]]
"""An introduction and a table, by heading."""


def measured(root: Path) -> list[dict[str, Any]]:
    """The samples of the evaluation. Raises UserError if there are none."""
    if not (lines := read_samples(evaluation_folder(root))):
        raise UserError(f"{evaluation_folder(root)}: no samples; nothing has been evaluated yet")
    return lines


def tables_of(settings: Settings, root: Path, samples: Samples) -> Tables:
    tables: Tables = {
        "Summary": (
            "T = 0, batch 1, outputs without repetition loops. Ratios compare tokens/s on prompts that both methods "
            "decoded. The target wrote the user turns of chat; those of everyday were written by hand.",
            main_table(samples),
        ),
        "Tokens per round": (
            "Outputs without repetition loops, standard errors over prompts. The rows `all` pool the tasks that have "
            "every context, as the plot does.",
            by_context(samples, samples.tokens_per_round),
        ),
        "Speedup": (
            "Tokens/s over vanilla's, on prompts where neither output has a repetition loop.",
            by_context(samples, partial(samples.speed_up, other="vanilla")),
        ),
        "The same text": (
            "Tokens per round of the tree, teacher-forced on vanilla's greedy answers to the longest prompts, which "
            "are shortened to their head and their last tokens, so that only the context changes. The bound at T = 1 "
            "is that of the deterministic tree.",
            same_text(samples),
        ),
        "Methods": (
            "Figures are those of outputs without repetition loops, because loops inflate the acceptance length of any "
            "draft. Ratios compare tokens/s on prompts that both methods decoded.",
            by_method(samples),
        ),
    }
    if settings.training.choose_layer and layer_file(root).exists():
        introduction = "Attention of the strongest induction head of each target layer to what followed, 0 to 1."
        tables["Layers"] = introduction, layer_table(root)
    for name in settings.probes:
        if probe_file(root, name).exists():
            introduction = "Fresh drafts after a few steps: tokens per round of a chain, on held-out answers."
            tables[f"Probe: {name}"] = introduction, probe_table(read_scores(root, name))
    if len(stages := stage_table(settings, root)):
        introduction = "The trainer's evaluation on held-out answers, chains of the depth that it trains."
        tables["Training"] = introduction, stages
    return tables


def write_page(page: Path, title: str, settings: Settings, root: Path, command: str, more: Tables) -> None:
    """Write the page of an evaluation with its plots. Raises UserError without samples. more: further tables."""
    samples = Samples.of_lines(measured(root))
    facts = json.loads((evaluation_folder(root) / FACTS).read_text())
    tables = tables_of(settings, root, samples) | more
    page.parent.mkdir(parents=True, exist_ok=True)
    draw_contexts(samples, page.with_name(PICTURES[0]))
    draw_tokens_per_second(samples, page.with_name(PICTURES[1]))
    write_tables(page, title, settings, command, facts, PICTURES, tables)


def write_tables(
    page: Path,
    title: str,
    settings: Settings,
    command: str,
    facts: dict[str, Any],
    pictures: Sequence[str],
    tables: Tables,
    lead: Sequence[str] = (),
) -> None:
    """Write a Markdown page of tables, with summary.json next to it. facts: those of an evaluation folder. lead: what
    the page says first."""
    records = {
        name: frame.astype(object).where(frame.notna(), None).to_dict("records") for name, (_, frame) in tables.items()
    }
    summary = {"command": command, "facts": facts, "settings": asdict(settings), "tables": records}
    write_atomically(page.with_name("summary.json"), json.dumps(summary, indent=1, default=str) + "\n")

    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    setup = {"command": f"`{command}`", "target": facts["target"], "device": facts["device"], "versions": versions}
    parts = [f"# {title}", "", *(f"- {line}" for line in [*lead, *map(": ".join, setup.items())]), ""]
    parts += [*(f"![{name.removesuffix('.png').replace('_', ' ')}]({name})" for name in pictures), ""]
    for name, (introduction, frame) in tables.items():
        parts += [f"## {name}", "", introduction, "", markdown(frame) if len(frame) else "Not measured.", ""]
    write_atomically(page, "\n".join(parts))


def by_context(samples: Samples, figure: Callable[..., Figure]) -> pandas.DataFrame:
    """A figure of `Samples` by temperature, task and context. The rows all pool the tasks with every context."""
    rows = []
    for temperature, task in product((0.0, 1.0), [*samples.tasks, None]):
        columns: dict[str, Any] = {"task": task or samples.long_tasks}
        for method in MAIN_METHODS[2 if task else 1 :]:
            if samples.of(method, temperature, **columns).empty:
                continue
            row: dict[str, Any] = {"T": f"{temperature:g}", "task": task or "all", "method": method}
            for context in sorted(set(samples.frame["context"])):
                one = figure(method, temperature=temperature, context=context, **columns)
                row[context_name(context)] = str(one)
            rows.append(row | {"all": str(figure(method, temperature=temperature, **columns))})
    return pandas.DataFrame(rows)


def same_text(samples: Samples) -> pandas.DataFrame:
    """Teacher-forced tokens per round on the same answers: one column per number of prompt tokens, then the ratios to
    the shortest prompts."""
    lengths = sorted(set(samples.forced["length"])) if len(samples.forced) else []
    rows = []
    for temperature, tokens in (("0", "decoded_tokens"), ("1 (bound)", "bound")) if lengths else ():
        for task in [None, *dict.fromkeys(samples.forced["task"])]:
            row: dict[str, Any] = {"T": temperature, "task": task or "all"}
            parts = {length: samples.read(length, task) for length in lengths}
            row |= {context_name(length): str(rate(part, "rounds", tokens)) for length, part in parts.items()}
            for length in lengths[1:]:
                ratio = speed_ratio(parts[length], parts[lengths[0]], tokens, "rounds")
                row[f"{length} over {lengths[0]}"] = str(ratio)
            rows.append(row)
    return pandas.DataFrame(rows)


def main_tasks(samples: Samples) -> list[str]:
    """The tasks with enough greedy outputs without loops."""
    counts = {task: [len(samples.of(method, task=task)) for method in MAIN_METHODS] for task in samples.tasks}
    return [task for task in samples.tasks if min(counts[task]) >= LEAST_OUTPUTS]


def main_table(samples: Samples) -> pandas.DataFrame:
    """The main methods at T = 0 on outputs without loops: a row per task with enough outputs, and one for all tasks."""
    rows = []
    for task in [*main_tasks(samples), None]:
        row: dict[str, Any] = {"task": task or "all"}
        for method in MAIN_METHODS[2:]:
            row[f"tokens per round, {method}"] = str(samples.tokens_per_round(method, task=task))
        for method in MAIN_METHODS:
            row[f"tokens/s, {method}"] = samples.tokens_per_second(method, task=task).text(0)
        for other in MAIN_METHODS[:2]:
            row[f"auto over {other}"] = str(samples.speed_up("auto", other, task=task))
        rows.append(row)
    return pandas.DataFrame(rows)


def by_method(samples: Samples) -> pandas.DataFrame:
    """Outputs, tokens per round, tokens/s and speed ratios: one row per method, temperature and task."""
    rows = []
    keys = samples.frame[["method", "temperature"]].drop_duplicates().sort_values("temperature", kind="stable")
    for method, temperature in keys.itertuples(index=False):
        for task in [None, *samples.tasks]:
            outputs = samples.of(method, temperature, loops=True, task=task)
            if outputs.empty:
                continue
            row: dict[str, Any] = {"method": method, "T": temperature, "task": task or "all", "outputs": len(outputs)}
            row["with loops"] = int(outputs["loops"].sum())
            row["tokens per round"] = str(samples.tokens_per_round(method, temperature, task=task))
            row["tokens/s"] = samples.tokens_per_second(method, temperature, task=task).text(0)
            for other in ("vanilla", "lookup"):
                ratio = samples.speed_up(method, other, temperature, task=task)
                row[f"over {other}"] = "-" if method == other else str(ratio)
            rows.append(row)
    return pandas.DataFrame(rows)


def draw_contexts(samples: Samples, file: Path) -> None:
    """Plot two figures of greedy outputs against the context, pooled over the tasks that have every context."""
    contexts, tasks = samples.contexts, samples.long_tasks
    figures_by_title: dict[str, Callable[..., Figure]] = {
        "tokens per round": samples.tokens_per_round,
        "tokens/s over vanilla": partial(samples.speed_up, other="vanilla"),
    }
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axes, (title, value) in zip(panels, figures_by_title.items(), strict=True):
        lines = {
            method: {context: value(method, task=tasks, context=context) for context in contexts}
            for method in MAIN_METHODS
        }
        draw_lines(axes, lines, title=title, ylim=(0, None))
        axes.margins(x=0.07)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(MAIN_METHODS))
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def draw_lines(
    axes: Any, lines: Mapping[str, Mapping[int, Figure]], colors: Mapping[str, str] = COLORS, **settings: Any
) -> None:
    """Plot figures by context with their errors, a line per label. settings: those of `Axes.set`."""
    for label, figures in lines.items():
        heights, errors = [one.value for one in figures.values()], [one.error for one in figures.values()]
        axes.errorbar(list(figures), heights, errors, marker="o", capsize=3, label=label, color=colors.get(label))
    contexts = sorted(set().union(*lines.values()))
    axes.set_xscale("log", base=2)
    axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
    axes.set(xlabel="context in tokens", **settings)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", alpha=0.3)


def draw_tokens_per_second(samples: Samples, file: Path) -> None:
    """Plot tokens/s of the main methods at T = 0: one group of bars per task, one bar per method."""
    tasks = main_tasks(samples)
    figures = {method: [samples.tokens_per_second(method, task=task) for task in tasks] for method in MAIN_METHODS}
    heights, errors = (
        pandas.DataFrame({method: [getattr(one, part) for one in own] for method, own in figures.items()}, index=tasks)
        for part in ("value", "error")
    )
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    if tasks:
        heights.plot.bar(yerr=errors, color=COLORS, width=0.8, rot=0, legend=False, ax=axes)
        figure.legend(loc="outside lower center", ncols=len(MAIN_METHODS), fontsize="small")
    axes.set(title="T = 0, outputs without repetition loops", ylabel="tokens/s")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
