"""Step `report`: tables, plots, summary.json and a Markdown page from the results of the other steps."""

import json
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib
import pandas

from experiments.cells import cells, read_samples
from experiments.claims import Diagnostics, Verdict, goal_verdict, paper_claims
from experiments.diagnostics import DIAGNOSTICS
from experiments.evaluation import FACTS, evaluation_folder
from experiments.files import write_atomically
from experiments.samples import Samples
from experiments.settings import RECIPE, Settings
from experiments.tables import Figure, context_name, markdown, speed_ratio, tokens_per_round, tokens_per_second
from experiments.training import SETTINGS, run_folder, summary, table
from longspec.cli.picture import COLORS
from longspec.errors import UserError

matplotlib.use("Agg")
from matplotlib import pyplot

PICTURES = ("contexts.png", "tokens_per_second.png")
MAIN_METHODS = ("vanilla", "lookup", "tree", "auto")
LEAST_OUTPUTS = 5
"""Minimum number of outputs per method for a task to appear in the summary and in the plot of tokens/s."""


def report(settings: Settings, root: Path, command: str) -> None:
    """Write the page and its files. Raises UserError if there are no samples. command: shown on the page."""
    folder = Path(settings.report)
    evaluation = evaluation_folder(root)
    lines = read_samples(evaluation) if evaluation.exists() else []
    if not lines:
        raise UserError(f"{evaluation}: no samples; run the step evaluate first")

    samples = Samples.of_lines(lines)
    facts = json.loads((evaluation / FACTS).read_text())
    facts |= {"not measured": unmeasured(settings, root, samples), "not timed": untimed(samples)}
    recipe = table(settings, root)
    file = root / "training" / DIAGNOSTICS
    diagnostics: Diagnostics = json.loads(file.read_text()) if file.exists() else {}
    tables = {
        "Summary": main_table(samples),
        "Tokens per round": by_context(samples, samples.tokens_per_round),
        "Speedup": by_context(samples, partial(samples.speed_up, other="vanilla")),
        "The same text": same_text(samples),
        "Methods": by_method(samples),
        "Outputs": output_counts(samples),
        "Goals": pandas.DataFrame([goal_verdict(samples, goal) for goal in settings.goals], columns=Verdict._fields),
        "Claims of the paper": pandas.DataFrame(paper_claims(samples, diagnostics), columns=Verdict._fields),
        "Seeds": by_seed(settings, root, samples),
        "Recipe": summary(recipe),
        "Diagnostics": diagnostics_table(diagnostics),
    }

    folder.mkdir(parents=True, exist_ok=True)
    draw_contexts(samples, folder / PICTURES[0])
    draw_tokens_per_second(samples, folder / PICTURES[1])
    records = {
        name: frame.astype(object).where(frame.notna(), None).to_dict("records") for name, frame in tables.items()
    }
    content = {"command": command, "facts": facts, "settings": asdict(settings)}
    content |= {"training": recipe_facts(settings, root), "tables": records}
    write_atomically(folder / "summary.json", json.dumps(content, indent=1, default=str) + "\n")
    write_atomically(folder / "samples.jsonl", "".join(json.dumps(_without_text(line)) + "\n" for line in lines))
    write_atomically(folder / "README.md", page(settings, command, facts, tables))
    print(f"report: {folder / 'README.md'}")


def recipe_facts(settings: Settings, root: Path) -> dict[str, Any]:
    """The settings of each trained stage of the recipe, those of the trainer included, with the first seed."""
    folder = run_folder(root, RECIPE, settings.training.seeds[0])
    files = {stage: folder / stage / SETTINGS for stage in settings.training.stages}
    return {stage: json.loads(file.read_text()) for stage, file in files.items() if file.exists()}


def unmeasured(settings: Settings, root: Path, samples: Samples) -> list[str]:
    """The tasks and contexts of the evaluation that have prompts but no samples."""
    planned = dict.fromkeys((cell.task, cell.context) for cell in cells(settings.evaluation, root))
    measured = set(zip(samples.frame["task"], samples.frame["context"], strict=True))
    return [f"{task} ({context_name(context)})" for task, context in planned if (task, context) not in measured]


def untimed(samples: Samples) -> list[str]:
    """The tasks and contexts whose samples have no times. Samples taken while other work used the device keep their
    tokens per round once their times (`decode_s`, `ttft_s`, `wall_s`) are null."""
    cells = samples.frame.groupby(["task", "context"], sort=False)["decode_s"].count()
    return [f"{task} ({context_name(context)})" for (task, context), times in cells.items() if not times]


def _without_text(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "token_ids"}


def by_context(samples: Samples, figure: Callable[..., Figure]) -> pandas.DataFrame:
    """A figure of tree and auto: one row per temperature, task and method, one column per context.

    The rows "all" pool the tasks that have every context, also those of lookup. figure: see `Samples`.
    """
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
            row |= {context_name(length): str(tokens_per_round(part, tokens)) for length, part in parts.items()}
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
        columns: dict[str, Any] = {} if task is None else {"task": task}
        row: dict[str, Any] = {"task": task or "all"}
        for method in MAIN_METHODS[2:]:
            row[f"tokens per round, {method}"] = str(samples.tokens_per_round(method, **columns))
        for method in MAIN_METHODS:
            row[f"tokens/s, {method}"] = samples.tokens_per_second(method, **columns).text(0)
        for other in MAIN_METHODS[:2]:
            row[f"auto over {other}"] = str(samples.speed_up("auto", other, **columns))
        rows.append(row)
    return pandas.DataFrame(rows)


def by_method(samples: Samples) -> pandas.DataFrame:
    """Tokens per round, tokens/s and speed ratios, outputs without loops: one row per method, temperature and task."""
    rows = []
    keys = samples.frame[["method", "temperature"]].drop_duplicates().sort_values("temperature", kind="stable")
    for method, temperature in keys.itertuples(index=False):
        for task in [None, *samples.tasks]:
            columns: dict[str, Any] = {} if task is None else {"task": task}
            chosen = samples.of(method, temperature, **columns)
            if chosen.empty:
                continue
            row: dict[str, Any] = {"method": method, "T": temperature, "task": task or "all"}
            row |= {"outputs": len(chosen), "tokens per round": str(tokens_per_round(chosen))}
            row["tokens/s"] = tokens_per_second(chosen).text(0)
            for other in ("vanilla", "lookup"):
                ratio = samples.speed_up(method, other, temperature, **columns)
                row[f"over {other}"] = "-" if method == other else str(ratio)
            rows.append(row)
    return pandas.DataFrame(rows)


def by_seed(settings: Settings, root: Path, samples: Samples) -> pandas.DataFrame:
    """Tokens per round of the greedy tree: one row per seed of the recipe, then mean and standard deviation.

    Empty if fewer than two seeds were evaluated, or if the draft is not the recipe's.
    """
    drafts = {settings.training.seeds[0]: samples}
    for seed in settings.training.seeds[1:]:
        if lines := read_samples(evaluation_folder(root, seed)):
            drafts[seed] = Samples(pandas.DataFrame(lines))
    if len(drafts) < 2 or settings.evaluation.draft:
        return pandas.DataFrame()

    means = []
    for seed_samples in drafts.values():
        by_task = {task: seed_samples.tokens_per_round("tree", task=task).value for task in samples.tasks}
        means.append(by_task | {"all": seed_samples.tokens_per_round("tree").value})
    values = pandas.DataFrame(means)
    rows = pandas.concat([values, values.mean().to_frame().T, values.std().to_frame().T], ignore_index=True)
    rows.insert(0, "seed", [*map(str, drafts), "mean", "sd"])
    return rows


def output_counts(samples: Samples) -> pandas.DataFrame:
    """Number of outputs with and without loops, and tokens per round of the outputs with loops."""
    rows = []
    for (method, temperature), group in samples.frame.groupby(["method", "temperature"], sort=False):
        looped = group[group["loops"]]
        counts = {"outputs": len(group), "with loops": len(looped), "without loops": len(group) - len(looped)}
        looped_length = str(tokens_per_round(looped)) if len(looped) else "-"
        rows.append({"method": method, "T": temperature, **counts, "tokens per round with loops": looped_length})
    return pandas.DataFrame(rows)


def diagnostics_table(diagnostics: Diagnostics) -> pandas.DataFrame:
    """Teacher-forced tokens per round, with the bound at T = 1 in parentheses: one row per draft, one column per run of
    the target."""
    rows = []
    for draft, by_run in diagnostics.items():
        row: dict[str, Any] = {"draft": draft}
        for name, figures in by_run.items():
            row[name] = f"{figures['tokens']:.2f} ({figures['bound']:.2f})"
        rows.append(row)
    return pandas.DataFrame(rows)


def draw_contexts(samples: Samples, file: Path) -> None:
    """Plot tokens per round and the speedup over vanilla against the context, one line per main method.

    Greedy outputs without loops, pooled over the tasks that have every context.
    """
    contexts, tasks = samples.contexts, samples.long_tasks
    figures_by_title: dict[str, Callable[..., Figure]] = {
        "tokens per round": samples.tokens_per_round,
        "tokens/s over vanilla": partial(samples.speed_up, other="vanilla"),
    }
    figure, panels = pyplot.subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    for axes, (title, value) in zip(panels, figures_by_title.items(), strict=True):
        for method in MAIN_METHODS:
            figures = [value(method, task=tasks, context=context) for context in contexts]
            heights, errors = [one.value for one in figures], [one.error for one in figures]
            axes.errorbar(contexts, heights, errors, marker="o", capsize=3, label=method, color=COLORS[method])
        axes.set_xscale("log", base=2)
        axes.set_xticks(contexts, [f"{context:,}" for context in contexts])
        axes.set(title=title, xlabel="context in tokens", ylim=(0, None))
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(axis="y", alpha=0.3)
        axes.margins(x=0.07)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(MAIN_METHODS))
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def draw_tokens_per_second(samples: Samples, file: Path) -> None:
    """Plot tokens/s of the main methods at T = 0: one group of bars per task, one bar per method."""
    tasks = main_tasks(samples)
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    width = 0.8 / len(MAIN_METHODS)
    for number, method in enumerate(MAIN_METHODS):
        figures = [samples.tokens_per_second(method, task=task) for task in tasks]
        offset = (number - (len(MAIN_METHODS) - 1) / 2) * width
        centers = [group + offset for group in range(len(tasks))]
        heights, errors = [one.value for one in figures], [one.error for one in figures]
        axes.bar(centers, heights, width, yerr=errors, label=method, color=COLORS[method])
    axes.set_xticks(range(len(tasks)), tasks)
    axes.set(title="T = 0, outputs without repetition loops", ylabel="tokens/s")
    figure.legend(loc="outside lower center", ncols=len(MAIN_METHODS), fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def page(settings: Settings, command: str, facts: dict[str, Any], tables: dict[str, pandas.DataFrame]) -> str:
    """The report as a Markdown page."""
    intro = {
        "Summary": "T = 0, batch 1, outputs without repetition loops. Ratios compare tokens/s on prompts that both "
        "methods decoded. The target wrote the user turns of chat; those of everyday were written by hand.",
        "Tokens per round": "Outputs without repetition loops, standard errors over prompts. The rows `all` pool the "
        "tasks that have every context, as the plot does.",
        "Speedup": "Tokens/s over vanilla's, on prompts where neither output has a repetition loop.",
        "The same text": "Tokens per round of the tree, teacher-forced on vanilla's greedy answers to the longest "
        "prompts, which are shortened to their head and their last tokens, so that only the context changes. The bound "
        "at T = 1 is that of the deterministic tree.",
        "Methods": "Outputs without repetition loops. Ratios compare tokens/s on prompts that both methods decoded.",
        "Outputs": "Repetition loops inflate the acceptance length of any draft, so these outputs are counted "
        "separately.",
        "Goals": "The goals set for this pair. Outputs without repetition loops.",
        "Claims of the paper": "The paper's target models have 7B to 32B parameters.",
        "Seeds": "Tokens per round of `tree` at T = 0 on outputs without repetition loops. All seeds decode the same "
        "prompts.",
        "Recipe": "The trainer's evaluation on held-out answers. It drafts chains of the depth that the variant "
        "trains. An arm changes the arm `short`, or the recipe if there is none.",
        "Diagnostics": "Teacher-forced tokens per round on validation answers. In parentheses: the bound of the "
        "deterministic tree at T = 1, which is 1 + the sum over its nodes of the target's probability of the "
        "node's path.",
    }
    skipped = [] if settings.text else ["Run without a text folder: gsm8k, qmsum, quote and aime24 are skipped.", ""]
    setup = [f"- command: `{command}`", f"- target: {facts['target']}", f"- device: {facts['device']}"]
    setup.append("- versions: " + ", ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    for gap in ("not measured", "not timed"):
        if facts[gap]:
            setup.append(f"- {gap}: " + ", ".join(facts[gap]))
    pictures = [f"![{name.removesuffix('.png').replace('_', ' ')}]({name})" for name in PICTURES]
    parts = [f"# {Path(settings.report).name}", "", *setup, "", *skipped, *pictures, ""]
    for name, frame in tables.items():
        parts += [f"## {name}", "", intro[name], "", markdown(frame) if len(frame) else "Not measured.", ""]
    return "\n".join(parts)
