"""The page of `experiments.drafts`: acceptance against context, time per round, memory and training of each draft."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import pandas
import torch

from experiments.comparison import BASELINES, Comparison, arm_settings
from longspec.errors import UserError
from longspec.inference.memory import slot_bytes
from longspec.models.draft_files import draft_settings, load_draft
from longspec.models.draft_layer import head_dim
from longspec.models.draft_vocabulary import MAPS
from longspec.models.target_files import read_config
from longspec.pipeline.cells import read_samples
from longspec.pipeline.evaluation import evaluation_folder
from longspec.pipeline.files import read_jsonl
from longspec.pipeline.report import draw_lines, write_tables
from longspec.pipeline.samples import Figure, pooled, prompt_names
from longspec.pipeline.settings import FORCED, MethodSettings
from longspec.pipeline.target import TargetText
from longspec.pipeline.training import FACTS as STAGE_FACTS
from longspec.pipeline.training import final_draft, run_folder, stage_row
from longspec.replacing import write_atomically

matplotlib.use("Agg")
from matplotlib import pyplot

PICTURE = "acceptance.png"
MIB = 2**20


def write_results(settings: Any, comparison: Comparison, root: Path, command: str) -> Path:
    """Write the page, its figure and its samples without tokens. Raises UserError if nothing is measured."""
    frame = pandas.DataFrame(list(all_lines(comparison, root)))
    if frame.empty:
        raise UserError(f"{root}: no arm is measured yet")
    shapes = {
        name: "tree" if max(method.tree_shape) > 1 else "chain" for name, method in forced_methods(comparison).items()
    }
    is_forced = frame["method"].isin(shapes)
    forced = frame[is_forced].assign(shape=lambda lines: lines["method"].map(shapes))
    training = training_table(settings, comparison, root)
    folder = Path(comparison.report)
    folder.mkdir(parents=True, exist_ok=True)
    tables = {
        "Acceptance against context": (
            "Tokens per round on vanilla's greedy answers to the longest prompts, which are shortened to their head "
            "and their last tokens, so that only the context changes. The bound at T = 1 is that of the deterministic "
            "tree. Errors are over seeds if there are several, else over prompts.",
            acceptance_table(forced),
        ),
        "Decoding": ("Batch 1, outputs without repetition loops.", decoding_table(frame[~is_forced])),
        "Drafts": (
            "Memory at the longest context, batch 1. Seconds are those of all stages, start-up included.",
            draft_table(settings, comparison, root, training),
        ),
        "Training": ("The trainer's evaluation on held-out answers.", training),
    }
    draw(forced, folder / PICTURE)
    facts = json.loads(next((root / "arms").glob("*/evaluation/settings.json")).read_text())
    page = folder / "README.md"
    write_tables(page, f"Drafts for {settings.target}", settings, command, facts, [PICTURE], tables)
    kept = frame.drop(columns="token_ids").to_json(orient="records", lines=True)
    write_atomically(folder / "samples.jsonl", kept)
    return page


def runs(comparison: Comparison, root: Path) -> Iterator[tuple[str, int, Path]]:
    """Name, seed and folder of each arm that has been started."""
    for name in comparison.arms:
        for folder in sorted(root.glob(f"arms/{name}-[0-9]*")):
            yield name, int(folder.name.removeprefix(f"{name}-")), folder


def forced_methods(comparison: Comparison) -> dict[str, MethodSettings]:
    """The teacher-forced methods by name."""
    return {one.name: one for one in (*comparison.methods, *comparison.baselines) if one.kind == FORCED}


def all_lines(comparison: Comparison, root: Path) -> Iterator[dict[str, Any]]:
    """The samples of all arms and seeds with the columns `arm` and `run`, and those of the baselines."""
    names = {method.name for method in comparison.methods}
    for name, run, folder in runs(comparison, root):
        for line in read_samples(evaluation_folder(folder)):
            if line["method"] in names:
                yield {"bound": 0.0, "last_tokens": None} | line | {"arm": name, "run": run}
    if (root / BASELINES).exists():
        drafters = {name: method.drafter for name, method in forced_methods(comparison).items()}
        for line in read_jsonl(root / BASELINES):
            arm = drafters.get(line["method"], line["method"])
            yield {"bound": 0.0, "last_tokens": None} | line | {"arm": arm, "run": 0}


def over_runs(group: pandas.DataFrame, top: str, bottom: str) -> Figure:
    """The ratio of two columns' sums, with its standard deviation over runs, or its error over prompts of one run."""
    whole = pooled([group[top], group[bottom]], prompt_names(group))
    ratios = [own[top].sum() / own[bottom].sum() for _, own in group.groupby("run")]
    return whole if len(ratios) < 2 else Figure(float(np.mean(ratios)), float(np.std(ratios, ddof=1)), whole.samples)


def read_tokens(forced: pandas.DataFrame) -> pandas.Series:
    """The number of prompt tokens that each forced sample reads."""
    return forced["last_tokens"].fillna(forced["context"]).astype(int)


def acceptance_table(forced: pandas.DataFrame) -> pandas.DataFrame:
    """One row per arm and kind of proposal, one column per context."""
    rows = []
    usable = forced[~forced["loops"].astype(bool)]
    for (arm, shape), group in usable.groupby(["arm", "shape"], sort=False):
        row: dict[str, Any] = {"draft": arm, "proposal": shape}
        for context, own in group.groupby(read_tokens(group)):
            row[f"{context} tokens"] = str(over_runs(own, "decoded_tokens", "rounds"))
            if own["bound"].any():
                row[f"{context} tokens, bound at T = 1"] = str(over_runs(own, "bound", "rounds"))
        rows.append(row)
    return pandas.DataFrame(rows)


def decoding_table(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Tokens per round, time per round and speed of each arm and method, by context and temperature."""
    rows = []
    usable = frame[~frame["loops"].astype(bool)].dropna(subset=["decode_s"])
    keys = ["arm", "method", "temperature", "context"]
    for (arm, method, temperature, context), group in usable.groupby(keys, sort=False):
        group = group.assign(ms=1000 * group["decode_s"])
        rows.append(
            {
                **{"draft": arm, "method": method, "T": temperature, "context": context},
                "tokens per round": str(over_runs(group, "decoded_tokens", "rounds")),
                "ms per round": str(over_runs(group, "ms", "rounds")),
                "tokens/s": over_runs(group, "decoded_tokens", "decode_s").text(0),
                "outputs": len(group),
            }
        )
    return pandas.DataFrame(rows)


def trained(settings: Any, comparison: Comparison, root: Path) -> Iterator[tuple[str, int, Any, Path]]:
    """Name, seed, settings and folder of each arm with a draft."""
    for name, seed, folder in runs(comparison, root):
        own = arm_settings(settings, comparison, name, seed)
        if final_draft(own, folder).exists():
            yield name, seed, own, folder


def draft_table(settings: Any, comparison: Comparison, root: Path, training: pandas.DataFrame) -> pandas.DataFrame:
    """Parameters and memory of the drafts, and the seconds of their training. training: see `training_table`."""
    target = read_config(TargetText.load(settings.target).path)
    longest = max(context for task in settings.evaluation.tasks.values() for context in task.contexts)
    rows: dict[str, dict[str, Any]] = {}
    for name, _, own, folder in trained(settings, comparison, root):
        draft = final_draft(own, folder)
        state, options = load_draft(draft), draft_settings(draft).options
        weights = sum(weight.numel() for key, weight in state.items() if key not in MAPS)
        shape = target if not hasattr(options, "config") else options.config(target)
        slot = 2 * shape.num_key_value_heads * head_dim(shape) * 2
        row = rows.setdefault(name, {"draft": name, "runs": 0})
        row |= {"runs": row["runs"] + 1, "parameters, M": weights / 1e6, "weights, MiB": 2 * weights / MIB}
        row |= {f"KV at {longest} tokens, MiB": slot * min(options.window, longest) / MIB}
        row["seconds per run"] = training.loc[training["draft"] == name, "seconds"].sum() / row["runs"]
    whole = slot_bytes(target, torch.bfloat16) * longest / MIB
    rows["target"] = {"draft": "target", f"KV at {longest} tokens, MiB": whole}
    return pandas.DataFrame(list(rows.values()))


def training_table(settings: Any, comparison: Comparison, root: Path) -> pandas.DataFrame:
    """One row per arm, seed and stage."""
    rows = []
    for name, seed, own, folder in trained(settings, comparison, root):
        for stage, planned in own.training.stages.items():
            part = run_folder(folder, seed) / stage
            steps = json.loads((part / STAGE_FACTS).read_text())["steps"]
            if row := stage_row(part, replace(planned, steps=steps)):
                rows.append({"draft": name, "seed": seed} | row)
    return pandas.DataFrame(rows, columns=None if rows else ["draft", "seconds"])


def draw(forced: pandas.DataFrame, file: Path) -> None:
    """Plot tokens per round against the context, one line per draft, one panel per kind of proposal."""
    usable = forced[~forced["loops"].astype(bool)]
    shapes = list(dict.fromkeys(usable["shape"]))
    figure, panels = pyplot.subplots(
        1, len(shapes), figsize=(4.8 * len(shapes), 3.8), layout="constrained", squeeze=False, sharey=True
    )
    for axes, shape in zip(panels[0], shapes, strict=True):
        lines = {
            str(arm): {c: over_runs(own, "decoded_tokens", "rounds") for c, own in group.groupby(read_tokens(group))}
            for arm, group in usable[usable["shape"] == shape].groupby("arm", sort=False)
        }
        draw_lines(axes, lines, title=str(shape), ylabel="tokens per round", ylim=(1, None))
    panels[0][0].legend(fontsize="small")
    figure.savefig(file, dpi=120)
    pyplot.close(figure)
