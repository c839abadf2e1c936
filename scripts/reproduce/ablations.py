"""One change at a time, on the same target: what each arm's draft accepts, and how its loss fell."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from longspec.inference.tree_shapes import AUTO, CANDIDATES, DEFAULT_SHAPE
from longspec.train.logging import METRICS_NAME
from scripts.demo.figure import smoothed
from scripts.pipeline.files import read_jsonl, write_json
from scripts.reproduce.cells import CELLS, Measurement, read_cells
from scripts.reproduce.evaluate import FACTS, FORCED, ROUNDS, evaluate, measure_draft
from scripts.reproduce.figures import draw_ablation, draw_attention, draw_losses
from scripts.reproduce.pair import load_pair
from scripts.reproduce.plan import EvaluationSettings
from scripts.reproduce.rounds import attention_by_context
from scripts.reproduce.run import STAGES, Run
from scripts.reproduce.summary import summarise

RESULTS = "results.json"
PLAN = (
    Measurement("vanilla", prompts=3, share=2),
    Measurement("tree", prompts=3, share=4),
    Measurement("tree", temperature=1.0, prompts=2, seeds=2, share=4),
)
WITH_AND_WITHOUT = {"anchor_offset": ("on", "off")}
"""Ablations about how soon a loss is reached: the arm with the feature, and the one without."""


def arm_settings(settings: EvaluationSettings, limit_s: float = 60.0) -> EvaluationSettings:
    """What an arm is evaluated with: the tree alone, beside vanilla, in less time."""
    return replace(settings, plan=PLAN, limit_s=limit_s, rounds=False)


def evaluate_arms(folder: Path, run: Run, arms: Mapping[str, Path], settings: EvaluationSettings) -> dict[str, Any]:
    """Evaluate each arm's draft, a checkpoint's folder, into `folder`/evaluation/<arm>; all of it in results.json.

    Returns {"name", "arms": {arm: {"methods", "forced", "losses"}}}, with "sooner" for the ablations in
    WITH_AND_WITHOUT. Draws ablation.png, and losses.png where the arms' training logs lie beside their checkpoints.
    """
    found: dict[str, Any] = {"name": folder.name, "arms": {}}
    for arm, draft in arms.items():
        print(f"{folder.name}: {arm}", flush=True)
        place = folder / "evaluation" / arm
        measure_draft(place, run, draft, settings)
        read = read_evaluation(place)
        losses = losses_of(draft.parent / METRICS_NAME)
        found["arms"][arm] = {"methods": read["methods"], "forced": read["forced"], "losses": losses}
    curves = {arm: result["losses"] for arm, result in found["arms"].items()}
    if folder.name in WITH_AND_WITHOUT:
        found["sooner"] = sooner(*(curves.get(arm, []) for arm in WITH_AND_WITHOUT[folder.name]))
    write_json(folder / RESULTS, found)
    draw_ablation(found, folder / "ablation.png")
    if all(curves.values()):
        draw_losses(curves, f"Loss of the arms: {folder.name}", folder / "losses.png")
    return found


def curriculum(folder: Path, run: Run, settings: EvaluationSettings) -> dict[str, Any]:
    """The main run's draft after each stage."""
    arms = {f"stage {number}": run.draft(settings.variant, number) for number in STAGES}
    return evaluate_arms(folder, run, arms, settings)


def tree_shapes(folder: Path, run: Run, settings: EvaluationSettings) -> dict[str, Any]:
    """The main draft with each of the shapes that `--tree_shape auto` chooses from, and with what that chooses."""
    names: dict[str, tuple[int, ...] | str] = {f"tree {' '.join(map(str, shape))}": shape for shape in CANDIDATES}
    names["tree auto"] = AUTO
    plan = [Measurement(name, "tree", prompts=3, tree_shape=shape) for name, shape in names.items()]
    evaluate(folder / "evaluation", run, replace(settings, plan=(Measurement("vanilla", prompts=3), *plan)))
    methods = read_evaluation(folder / "evaluation")["methods"]
    arms = {row["name"]: {"methods": [row]} for row in methods if row["name"] in names}
    found = {"name": folder.name, "arms": arms}
    write_json(folder / RESULTS, found)
    draw_ablation(found, folder / "ablation.png")
    return found


def dense_mask(folder: Path, run: Run, settings: EvaluationSettings) -> dict[str, Any]:
    """A verification's attention under a dense mask against hybrid attention, by context."""
    folder.mkdir(parents=True, exist_ok=True)
    pair = load_pair(run.target, run.draft(settings.variant, settings.stage))
    rows = attention_by_context(pair, settings.contexts, DEFAULT_SHAPE)
    found = {"name": folder.name, "attention": rows}
    write_json(folder / RESULTS, found)
    draw_attention(rows, folder / "ablation.png")
    return found


UNTRAINED = {"curriculum": curriculum, "tree_shapes": tree_shapes, "dense_mask": dense_mask}
"""The ablations that need no training of their own."""


def read_evaluation(folder: Path) -> dict[str, Any]:
    """What `measure_draft` left in a folder, summed up."""
    parts = {Path(name).stem: folder / name for name in (FACTS, FORCED, ROUNDS)}
    read = {name: json.loads(path.read_text()) if path.is_file() else {} for name, path in parts.items()}
    return {"methods": summarise(read_cells(folder / CELLS))} | read


def losses_of(metrics: Path) -> list[tuple[int, float]]:
    """(step, training loss) of a draft's training; empty where its log is not there."""
    if not metrics.is_file():
        return []
    return [(line["step"], line["loss"]) for line in read_jsonl(metrics) if "loss" in line]


def sooner(with_it: list[tuple[int, float]], without: list[tuple[int, float]]) -> float | None:
    """The steps of the second curve over the steps after which the first one's smoothed loss is where the second's
    ends; None if it never is, or a curve is missing."""
    if not with_it or not without:
        return None
    end = smoothed([loss for _, loss in without])[-1]
    losses = smoothed([loss for _, loss in with_it])
    reached = next((step for (step, _), loss in zip(with_it, losses, strict=True) if loss <= end), None)
    return None if reached is None else without[-1][0] / max(1, reached)
