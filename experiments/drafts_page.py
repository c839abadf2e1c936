"""The page of `experiments.drafts`: acceptance against context, time per round, memory and training of each draft."""

import gzip
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas
import torch

from experiments.comparison import Comparison, arm_folder, baselines_folder, find_trained, seconds_per_step
from experiments.drafts_verdict import CLEAR, ROUNDS, SPEED, gaps, opening, over_runs, relative
from longspec.cli.picture import COLORS
from longspec.inference.memory import slot_bytes
from longspec.inference.registry import choose_pair
from longspec.models.draft_files import draft_settings, load_draft
from longspec.models.draft_layer import head_dim
from longspec.models.draft_vocabulary import MAPS
from longspec.models.target_files import read_config
from longspec.pipeline.cells import read_samples
from longspec.pipeline.evaluation import FACTS, evaluation_folder
from longspec.pipeline.report import draw_lines, write_tables
from longspec.pipeline.samples import Figure
from longspec.pipeline.settings import FORCED, MethodSettings, Settings
from longspec.pipeline.training import final_draft, run_folder, stage_facts, stage_row
from longspec.replacing import write_atomically
from longspec.untrusted import read_json

matplotlib.use("Agg")
from matplotlib import pyplot

PICTURE = "acceptance.png"
MIB = 2**20
ERRORS = (
    f"± is a standard error over prompts and, where there are several, over seeds. A draft is within {CLEAR} errors of "
    "another one if the ratio of the two on the same prompts is. Outputs with repetition loops are left out."
)
LINES = ("#0072b2", "#56b4e9", "#d55e00", "#cc79a7", "#009e73", "#000000")
"""Colors of the arms."""


def write_results(
    settings: Settings, comparison: Comparison, root: Path, seeds: Sequence[int], command: str
) -> Path | None:
    """Write the page, its figure and its samples without tokens; None if nothing is measured."""
    frame = pandas.DataFrame(list(all_lines(comparison, root)))
    if frame.empty:
        return None
    usable = frame[~frame["loops"].astype(bool)]
    forced = usable[usable["shape"].notna()].astype({"read": int})
    decoded = usable[usable["shape"].isna()].dropna(subset=["decode_s"])
    folder = Path(comparison.report or root / "report")
    folder.mkdir(parents=True, exist_ok=True)
    tables = {
        "Acceptance against context": (
            "Tokens per round on vanilla's greedy answers to the longest prompts, which are shortened to their head "
            "and their last tokens, so that only the context changes. The bound at T = 1 is that of the deterministic "
            "tree.",
            acceptance_table(forced),
        ),
        "Decoding": (
            "Drafts of the first seed, batch 1, one at a time. `seq` drafts a chain. Arms that differ only "
            "in training are timed once.",
            decoding_table(decoded),
        ),
        "Memory": ("Of a draft in bf16, at the longest context, batch 1.", memory_table(settings, comparison, root)),
        "Training": (
            "The trainer's evaluation on held-out answers, chains. Milliseconds per step are the median of a training "
            "that had a GPU to itself; GPU seconds are their product with the steps. The rate is the largest of the "
            "stage.",
            training_table(settings, comparison, root),
        ),
    }
    draw(list(comparison.arms), forced, folder / PICTURE)
    measured = [baselines_folder(root), *root.glob("arms/*")]
    facts = next(read_json(file) for folder in measured if (file := evaluation_folder(folder) / FACTS).exists())
    missing = gaps(settings, comparison, root, seeds)
    lead = [*opening(comparison, forced, decoded), *([f"**Incomplete.** {missing}"] if missing else []), ERRORS]
    page = folder / "README.md"
    write_tables(page, f"Drafts for {settings.target}", settings, command, facts, [PICTURE], tables, lead)
    kept = frame.drop(columns="token_ids").to_json(orient="records", lines=True)
    write_atomically(folder / "samples.jsonl.gz", gzip.compress(kept.encode(), mtime=0))
    return page


def all_lines(comparison: Comparison, root: Path) -> Iterator[dict[str, Any]]:
    """The samples of all arms and seeds, and those of the baselines, with the columns `arm` and `run`; `shape` and
    `read`, the number of prompt tokens read, of teacher-forced ones; `label` of the others."""
    own = {method.name: method for method in (*comparison.forced, *comparison.decoding)}
    shared = {method.name: method for method in comparison.baselines}
    for name in comparison.arms:
        for seed in started(root, name):
            for line in read_samples(evaluation_folder(arm_folder(root, name, seed))):
                if line["method"] in own:
                    yield _columns(own[line["method"]], line, name) | {"run": seed}
    for line in read_samples(evaluation_folder(baselines_folder(root))):
        if (method := shared.get(line["method"])) is not None:
            yield _columns(method, line, method.drafter if method.kind == FORCED else method.name) | {"run": 0}


def _columns(method: MethodSettings, line: dict[str, Any], arm: str) -> dict[str, Any]:
    shape = read = None
    if method.kind == FORCED:
        shape, read = "tree" if max(method.tree_shape) > 1 else "chain", method.last_tokens or line["context"]
    label = arm if arm == method.name else f"{arm} {method.name}"
    return {"bound": None, "decode_s": None} | line | {"arm": arm, "label": label, "shape": shape, "read": read}


def acceptance_table(forced: pandas.DataFrame) -> pandas.DataFrame:
    """One row per arm and kind of proposal, one column per context, and the ratio of the longest to the shortest."""
    rows = []
    for (arm, shape), group in forced.groupby(["arm", "shape"], sort=False):
        row: dict[str, Any] = {"draft": arm, "proposal": shape}
        parts = dict(list(group.groupby("read")))
        for read, own in parts.items():
            row[f"{read} tokens"] = str(over_runs(own, *ROUNDS))
        first, last = min(parts), max(parts)
        if first < last:
            row[f"{last} over {first}"] = str(relative(parts[last], parts[first], *ROUNDS))
        for read, own in parts.items():
            if own["bound"].any():
                row[f"{read} tokens, bound at T = 1"] = str(over_runs(own, "bound", "rounds"))
        rows.append(row)
    return pandas.DataFrame(rows)


def decoding_table(decoded: pandas.DataFrame) -> pandas.DataFrame:
    """Tokens per round, time per round and speed of each arm and method, by temperature and context."""
    rows, order = [], ["temperature", "context"]
    decoded = decoded.assign(ms=1000 * decoded["decode_s"]).sort_values(order, kind="stable")
    for (temperature, context, arm, method), group in decoded.groupby([*order, "arm", "method"], sort=False):
        rows.append(
            {
                **{"T": f"{temperature:g}", "context": context, "draft": arm, "method": method},
                "tokens per round": str(over_runs(group, *ROUNDS)),
                "ms per round": str(over_runs(group, "ms", "rounds")),
                "tokens/s": over_runs(group, *SPEED).text(0),
                "outputs": len(group),
            }
        )
    return pandas.DataFrame(rows)


def started(root: Path, name: str) -> list[int]:
    """The seeds of an arm that have a folder."""
    found = [folder.name.rpartition("-") for folder in root.glob("arms/*")]
    return sorted(int(seed) for own, _, seed in found if own == name)


def trained(settings: Settings, comparison: Comparison, root: Path, name: str) -> dict[int, Settings]:
    """The settings of each trained seed of an arm."""
    seeds = {seed: find_trained(settings, comparison, root, name, seed) for seed in started(root, name)}
    return {seed: own for seed, own in seeds.items() if own is not None}


def memory_table(settings: Settings, comparison: Comparison, root: Path) -> pandas.DataFrame:
    """Parameters and memory of the drafts, and of the target's keys and values."""
    target = read_config(choose_pair(settings.target).target)
    longest = max(context for task in settings.evaluation.tasks.values() for context in task.contexts)
    kv = f"KV at {longest} tokens, MiB"
    rows: list[dict[str, Any]] = []
    for name in comparison.arms:
        for seed, own in list(trained(settings, comparison, root, name).items())[:1]:
            draft = final_draft(own, arm_folder(root, name, seed))
            state, options = load_draft(draft), draft_settings(draft).options
            weights = sum(weight.numel() for key, weight in state.items() if key not in MAPS)
            shape = target if not hasattr(options, "config") else options.config(target)
            slot = 2 * shape.num_key_value_heads * head_dim(shape) * torch.bfloat16.itemsize
            row = {"draft": name, "parameters, M": weights / 1e6, "weights, MiB": 2 * weights / MIB}
            rows.append(row | {kv: slot * min(options.window, longest) / MIB})
    return pandas.DataFrame([*rows, {"draft": "target", kv: slot_bytes(target, torch.bfloat16) * longest / MIB}])


def training_table(settings: Settings, comparison: Comparison, root: Path) -> pandas.DataFrame:
    """One row per arm and stage: steps, seconds and the trainer's evaluation, over all seeds."""
    rows = []
    for name, arm in comparison.arms.items():
        seeds = trained(settings, comparison, root, name)
        speeds = seconds_per_step(settings, comparison, root, arm.like or name, max(seeds, default=0))
        for number, stage in enumerate(settings.training.stages):
            parts = [(run_folder(arm_folder(root, name, seed), seed) / stage, own) for seed, own in seeds.items()]
            stages = [one for part, own in parts if (one := stage_row(part, own.training.stages[stage]))]
            if not stages:
                continue
            row: dict[str, Any] = {"draft": name, "seeds": len(stages), "stage": stage, "steps": stages[0]["steps"]}
            used = parts[0][1].training.stages[stage]
            values = stage_facts(used, 0) | {f"trainer.{key}": value for key, value in used.overrides.items()}
            row |= {"optimizer": values["trainer.optimizer"], "rate": str(values["trainer.learning_rate"])}
            if speeds is not None:
                row["ms per step"] = f"{1000 * speeds[number]:.1f}"
                row["GPU seconds"] = f"{row['steps'] * speeds[number]:.0f}"
            for key, title in (("eval_acceptance_length", "tokens per round"), ("eval_loss", "loss")):
                ends = np.array([one[key] for one in stages], float)
                error = ends.std(ddof=1) / len(ends) ** 0.5 if len(ends) > 1 else float("nan")
                row[title] = Figure(float(ends.mean()), float(error), len(ends)).text(3)
            rows.append(row)
    return pandas.DataFrame(rows)


def draw(arms: Sequence[str], forced: pandas.DataFrame, file: Path) -> None:
    """Plot tokens per round against the context, one line per draft, one panel per kind of proposal."""
    shapes = list(dict.fromkeys(forced["shape"]))
    size = (4.8 * max(1, len(shapes)), 4.4)
    figure, panels = pyplot.subplots(
        1, max(1, len(shapes)), figsize=size, layout="constrained", squeeze=False, sharey=True
    )
    labels: dict[str, Any] = {}
    for axes, shape in zip(panels[0], shapes, strict=False):
        own = forced[forced["shape"] == shape]
        lines = {
            str(arm): {read: over_runs(part, *ROUNDS) for read, part in group.groupby("read")}
            for arm, group in own.groupby("arm", sort=False)
        }
        draw_lines(axes, lines, colors=COLORS | dict(zip(arms, LINES, strict=False)), title=str(shape), ylim=(1, None))
        handles, names = axes.get_legend_handles_labels()
        labels |= dict(zip(names, handles, strict=True))
    panels[0][0].set_ylabel("tokens per round, T = 0")
    figure.legend(list(labels.values()), list(labels), loc="outside lower center", ncols=3, fontsize="small")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
