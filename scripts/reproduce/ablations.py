"""One change at a time, on the same target: what each arm's draft accepts, and how its loss fell."""

import json
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from longspec.inference.methods import DEFAULT_SHAPE
from longspec.train.logging import METRICS_NAME
from scripts.pipeline.files import read_jsonl, write_json
from scripts.reproduce.cells import CELLS, Measurement, read_cells
from scripts.reproduce.evaluate import FACTS, FORCED, ROUNDS, evaluate, measure_draft
from scripts.reproduce.figures import draw_ablation, draw_attention, draw_losses
from scripts.reproduce.pair import load_pair
from scripts.reproduce.plan import EvaluationSettings
from scripts.reproduce.rounds import attention_by_context
from scripts.reproduce.run import STAGES, Run, Trained
from scripts.reproduce.summary import summarise
from scripts.reproduce.target import TRAINING

RESULTS = "results.json"
PLAN = (
    Measurement("vanilla", prompts=3, share=2),
    Measurement("tree", prompts=3, share=4),
    Measurement("tree", temperature=1.0, prompts=2, seeds=2, share=4),
)
MOST_POINTS = 40
CURVES = {"losses": "loss", "held_out_losses": "eval_loss"}
"""Of an arm's last stage."""
WITH_AND_WITHOUT = {"anchor_offset": ("on", "off")}
"""Ablations about how soon a loss is reached: the arm with the feature, and the one without."""

SHAPES: tuple[tuple[int, ...], ...] = (DEFAULT_SHAPE, (1,) * 4, (2, 4, 4, 4), (4, 8, 8, 8, 8), (16, 32, 32, 32, 32))


def arm_settings(settings: EvaluationSettings, limit_s: float = 60.0) -> EvaluationSettings:
    """What an arm is evaluated with: the tree alone, beside vanilla, in less time."""
    return replace(settings, plan=PLAN, limit_s=limit_s, rounds=False)


def evaluate_arms(folder: Path, arms: Mapping[str, Trained], settings: EvaluationSettings) -> dict[str, Any]:
    """Evaluate each arm's draft beside its stage's folder, once for all ablations; all of it in `folder`/results.json.

    Returns {"name", "arms": {arm: {"methods", "forced", "target_loss", "losses", "held_out_losses"}}}, with "sooner"
    for the ablations in WITH_AND_WITHOUT. Draws ablation.png, and the losses where the arms' logs beside their
    checkpoints have them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {"name": folder.name, "arms": {}}
    for arm, (run, draft) in arms.items():
        print(f"{folder.name}: {arm}", flush=True)
        place = draft.parent.with_name(f"{draft.parent.name}-evaluation")
        measure_draft(place, run, draft, settings)
        read = read_evaluation(place)
        curves = {name: losses_of(draft.parent / METRICS_NAME, field) for name, field in CURVES.items()}
        result = {"methods": read["methods"], "forced": read["forced"], "target_loss": target_loss(run)}
        found["arms"][arm] = result | curves
    results = found["arms"]
    if folder.name in WITH_AND_WITHOUT:
        pair = [results[arm]["held_out_losses"] if arm in results else [] for arm in WITH_AND_WITHOUT[folder.name]]
        found["sooner"] = sooner(*pair)
    write_json(folder / RESULTS, found)
    draw_ablation(found, folder / "ablation.png")
    for name in CURVES:
        if all(result[name] for result in results.values()):
            curves = {arm: result[name] for arm, result in results.items()}
            draw_losses(curves, f"{folder.name}: {name.replace('_', ' ')}", folder / f"{name}.png")
    return found


def curriculum(folder: Path, run: Run, settings: EvaluationSettings) -> dict[str, Any]:
    """The main run's draft after each stage."""
    arms = {f"stage {number}": Trained(run, run.draft(settings.variant, number)) for number in STAGES}
    return evaluate_arms(folder, arms, settings)


def tree_shapes(folder: Path, run: Run, settings: EvaluationSettings) -> dict[str, Any]:
    """The main draft with trees of several shapes. In twice the time that an arm has."""
    names = {f"tree {' '.join(map(str, shape))}": shape for shape in SHAPES}
    shapes = (Measurement(name, "tree", prompts=3, tree_shape=shape) for name, shape in names.items())
    plan = Measurement("vanilla", prompts=3), *shapes
    evaluate(folder / "evaluation", run, replace(settings, plan=plan, limit_s=2 * settings.limit_s))
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


def target_loss(run: Run) -> float | None:
    """The target's last held-out loss."""
    file = run.target / TRAINING
    lines = json.loads(file.read_text()) if file.is_file() else []
    return next((line["held_out_loss"] for line in reversed(lines) if "held_out_loss" in line), None)


def losses_of(metrics: Path, field: str = "loss") -> list[tuple[int, float]]:
    """(step, loss) of a draft's training, means over some steps where there are over MOST_POINTS.

    Empty where its log, or this field of it, is not there.
    """
    if not metrics.is_file():
        return []
    points = [(line["step"], line[field]) for line in read_jsonl(metrics) if field in line]
    some = max(1, -(-len(points) // MOST_POINTS))
    groups = [points[start : start + some] for start in range(0, len(points), some)]
    return [(group[-1][0], mean(loss for _, loss in group)) for group in groups]


def sooner(with_it: list[tuple[int, float]], without: list[tuple[int, float]]) -> float | None:
    """The steps of the second curve over those after which the first one has come to the loss that the second ends
    with, on the straight line between two evaluations; None if it never does, or a curve is missing.

    Held-out losses: in training each step's rows have a loss of their own. Where the first evaluation is there already,
    it is the steps over that one's.
    """
    if not with_it or not without:
        return None
    last, end = without[-1]
    if with_it[0][1] <= end:
        return last / with_it[0][0]
    for (step, loss), (after, lower) in pairwise(with_it):
        if lower <= end:
            return last / (step + (after - step) * (loss - end) / (loss - lower))
    return None
