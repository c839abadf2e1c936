"""Step `report`: tables, pictures, summary.json and a page in Markdown from what the other steps left."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import pandas

from experiments.cells import read_samples
from experiments.claims import Diagnostics, Samples, Verdict, paper_claims, targets
from experiments.diagnostics import DIAGNOSTICS
from experiments.evaluation import FACTS, evaluation_folder
from experiments.files import write_atomically
from experiments.settings import Settings
from experiments.tables import Figure, markdown, tokens_per_round, tokens_per_second
from experiments.training import summary, table
from longspec.errors import UserError

matplotlib.use("Agg")
from matplotlib import pyplot

PICTURES = ("tokens_per_round.png", "tokens_per_second.png")


def report(settings: Settings, root: Path, command: str) -> None:
    """Write the page and its files. Raises UserError if nothing was evaluated."""
    folder, evaluation = Path(settings.report), evaluation_folder(root)
    lines = read_samples(evaluation) if evaluation.exists() else []
    if not lines:
        raise UserError(f"{evaluation}: no samples; run the step evaluate first")
    samples = Samples(pandas.DataFrame(lines))
    facts = json.loads((evaluation / FACTS).read_text())
    recipe = table(settings, root)
    file = root / "training" / DIAGNOSTICS
    diagnostics: Diagnostics = json.loads(file.read_text()) if file.exists() else {}
    tables = {
        "Tokens per round": by_task_and_context(samples),
        "Methods": by_method(samples),
        "Outputs": output_counts(samples),
        "Targets": pandas.DataFrame(targets(samples, facts["device"].startswith("cpu")), columns=Verdict._fields),
        "Claims of the paper": pandas.DataFrame(paper_claims(samples, diagnostics), columns=Verdict._fields),
        "Seeds": by_seed(settings, root, samples),
        "Recipe": summary(recipe),
        "Diagnostics": diagnostics_table(diagnostics),
    }
    folder.mkdir(parents=True, exist_ok=True)
    draw_tokens_per_round(samples, folder / PICTURES[0])
    draw_tokens_per_second(samples, folder / PICTURES[1])
    records = {
        name: frame.astype(object).where(frame.notna(), None).to_dict("records") for name, frame in tables.items()
    }
    content = {"command": command, "facts": facts, "settings": asdict(settings), "tables": records}
    write_atomically(folder / "summary.json", json.dumps(content, indent=1, default=str) + "\n")
    write_atomically(folder / "samples.jsonl", "".join(json.dumps(_without_text(line)) + "\n" for line in lines))
    write_atomically(folder / "README.md", page(settings, command, facts, tables))
    print(f"report: {folder / 'README.md'}")


def _without_text(line: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in line.items() if name != "token_ids"}


def by_task_and_context(samples: Samples) -> pandas.DataFrame:
    """Tokens per round of the tree on outputs without loops, a row per task and temperature, a column per context."""
    contexts = sorted(set(samples.frame["context"]))
    temperatures = sorted(set(samples.frame["temperature"]))
    rows = []
    for temperature in temperatures:
        for task in samples.tasks:
            chosen = samples.of("tree", temperature, task=task)
            row: dict[str, Any] = {"task": task, "T": temperature}
            for context in contexts:
                row[context_name(context)] = str(tokens_per_round(chosen[chosen["context"] == context]))
            rows.append(row | {"all": str(tokens_per_round(chosen))})
    return pandas.DataFrame(rows)


def context_name(context: int) -> str:
    return f"{context} tokens" if context else "short"


def by_method(samples: Samples) -> pandas.DataFrame:
    """Tokens per round, tokens/s and ratios on outputs without loops, a row per method, temperature and task."""
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
            row["tokens/s"] = _whole(tokens_per_second(chosen))
            for other in ("vanilla", "lookup"):
                ratio = samples.speed_up(method, other, temperature, **columns)
                row[f"over {other}"] = "-" if method == other else str(ratio)
            rows.append(row)
    return pandas.DataFrame(rows)


def _whole(figure: Figure) -> str:
    return f"{figure.value:.0f}" if math.isnan(figure.error) else f"{figure.value:.0f} ± {figure.error:.0f}"


def by_seed(settings: Settings, root: Path, samples: Samples) -> pandas.DataFrame:
    """Tokens per round of the greedy tree, a row per seed of the recipe, then their mean and standard deviation."""
    drafts = {settings.training.seeds[0]: samples}
    for seed in settings.training.seeds[1:]:
        if lines := read_samples(evaluation_folder(root, seed)):
            drafts[seed] = Samples(pandas.DataFrame(lines))
    if len(drafts) < 2 or settings.evaluation.draft:
        return pandas.DataFrame()
    values = pandas.DataFrame(
        [
            {task: tokens_per_round(of_seed.of("tree", task=task)).value for task in samples.tasks}
            | {"all": tokens_per_round(of_seed.of("tree")).value}
            for of_seed in drafts.values()
        ]
    )
    rows = pandas.concat([values, values.mean().to_frame().T, values.std().to_frame().T], ignore_index=True)
    rows.insert(0, "seed", [*map(str, drafts), "mean", "sd"])
    return rows


def output_counts(samples: Samples) -> pandas.DataFrame:
    """Numbers of outputs with and without loops, and tokens per round of those that loop."""
    rows = []
    for (method, temperature), group in samples.frame.groupby(["method", "temperature"], sort=False):
        looped = group[group["loops"]]
        counts = {"outputs": len(group), "with loops": len(looped), "without loops": len(group) - len(looped)}
        of_loops = str(tokens_per_round(looped)) if len(looped) else "-"
        rows.append({"method": method, "T": temperature, **counts, "tokens per round with loops": of_loops})
    return pandas.DataFrame(rows)


def diagnostics_table(diagnostics: Diagnostics) -> pandas.DataFrame:
    """A row per draft: teacher-forced tokens per round, and in parentheses the bound at T = 1, by run of the target."""
    rows = []
    for draft, by_run in diagnostics.items():
        row: dict[str, Any] = {"draft": draft}
        for name, figures in by_run.items():
            row[name] = f"{figures['tokens']:.2f} ({figures['bound']:.2f})"
        rows.append(row)
    return pandas.DataFrame(rows)


def draw_tokens_per_round(samples: Samples, file: Path) -> None:
    """Bars of the tree's tokens per round at T = 0, a group per task, a bar per context."""
    contexts = sorted(set(samples.frame["context"]))
    figures = {
        context_name(context): [
            tokens_per_round(samples.of("tree", task=task, context=context)) for task in samples.tasks
        ]
        for context in contexts
    }
    _bars(samples.tasks, figures, "tokens per round, tree, T = 0", file)


def draw_tokens_per_second(samples: Samples, file: Path) -> None:
    """Bars of tokens/s at T = 0, a group per task, a bar per method."""
    methods = list(dict.fromkeys(samples.frame["method"]))
    figures = {
        method: [tokens_per_second(samples.of(method, task=task)) for task in samples.tasks] for method in methods
    }
    _bars(samples.tasks, figures, "tokens/s, T = 0", file)


def _bars(groups: list[str], figures: dict[str, list[Figure]], title: str, file: Path) -> None:
    """Grouped bars with standard errors; figures without samples leave a gap."""
    figure, axes = pyplot.subplots(figsize=(9, 4), layout="constrained")
    width = 0.8 / len(figures)
    for number, (name, values) in enumerate(figures.items()):
        places = [group + (number - (len(figures) - 1) / 2) * width for group in range(len(groups))]
        heights = [0.0 if math.isnan(one.value) else one.value for one in values]
        errors = [0.0 if math.isnan(one.error) else one.error for one in values]
        axes.bar(places, heights, width, yerr=errors, label=name, error_kw={"linewidth": 0.8})
    axes.set_xticks(range(len(groups)), groups)
    axes.set_title(title)
    figure.legend(loc="outside lower center", ncols=6, fontsize="small")
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)
    pyplot.close(figure)


def page(settings: Settings, command: str, facts: dict[str, Any], tables: dict[str, pandas.DataFrame]) -> str:
    """The report in Markdown."""
    intro = {
        "Tokens per round": "Method `tree`, outputs without repetition loops, with standard errors over prompts.",
        "Methods": "Outputs without loops. Ratios compare tokens/s on the prompts that both methods decoded.",
        "Outputs": "Repetition loops inflate the acceptance length of any draft, so they are counted apart.",
        "Targets": "On outputs without loops, T = 0 unless noted.",
        "Claims of the paper": "The paper's targets are models of 7B to 32B.",
        "Seeds": "Tokens per round of `tree` at T = 0 on outputs without loops; the same prompts for every seed.",
        "Recipe": "The trainer's own evaluation on held-out answers, by chains as deep as the variant trains. "
        "Each arm changes one thing.",
        "Diagnostics": "Teacher-forced tokens per round on validation answers; in parentheses the bound of the "
        "deterministic tree at T = 1, 1 + the sum of p over its nodes.",
    }
    left_out = [] if settings.text else ["Run without a text folder: gsm8k, qmsum and aime24 are left out.", ""]
    setup = [f"- command: `{command}`", f"- target: {facts['target']}", f"- device: {facts['device']}"]
    setup.append("- versions: " + ", ".join(f"{name} {version}" for name, version in facts["versions"].items()))
    pictures = [f"![{name.removesuffix('.png').replace('_', ' ')}]({name})" for name in PICTURES]
    parts = [f"# {Path(settings.report).name}", "", *setup, "", *left_out, *pictures, ""]
    for name, frame in tables.items():
        parts += [f"## {name}", "", intro[name], "", markdown(frame) if len(frame) else "Not measured.", ""]
    return "\n".join(parts)
