"""Ablation arms, and the results page of a pair, from the folder that `longspec draft` has written."""

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

import pandas
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from experiments.claims import Goal, Verdict, check_goal, goal_verdict, paper_claims
from longspec.errors import UserError, first_line
from longspec.pipeline.cells import read_samples
from longspec.pipeline.evaluation import evaluate, evaluation_folder
from longspec.pipeline.files import settings_file
from longspec.pipeline.report import Tables, measured, write_page
from longspec.pipeline.samples import Samples
from longspec.pipeline.settings import (
    FORCED,
    MethodSettings,
    Settings,
    StageSettings,
    TrainingSettings,
    check_integers,
    settings_yaml,
)
from longspec.pipeline.training import run_folder, stage_row, train
from longspec.replacing import write_atomically

T = TypeVar("T")
TEXT = ("prompts", "answers", "cache")
"""Folders that the arms share with the recipe."""


@dataclass
class Experiment:
    """The section `experiment` of the settings."""

    report: str | None = None
    """Folder of the results page; None for `report` in the output folder."""
    arms: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Changes of stage 1 by name of the arm, which trains this stage only."""
    arm_prompts: int = 2
    """Number of prompts per task and context on whose greedy answers the drafts of the arms are compared."""
    goals: list[Goal] = field(default_factory=list)


def read_section(kind: type[T], settings: Settings) -> T:
    """The section `experiment`, as a dataclass. Raises UserError that names an invalid key."""
    try:
        section: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(kind), settings.experiment))
    except OmegaConfBaseException as error:
        raise UserError(f"config key experiment.{getattr(error, 'full_key', '')}: {first_line(error)}") from error
    check_integers(section, ".experiment")
    return section


def read_experiment(settings: Settings) -> Experiment:
    """The section `experiment`. Raises UserError that names an invalid key."""
    experiment = read_section(Experiment, settings)
    for number, goal in enumerate(experiment.goals):
        check_goal(goal, f"experiment.goals[{number}]")
    for name in experiment.arms:
        arm_settings(settings, experiment, name)
    return experiment


def arm_folder(root: Path, name: str) -> Path:
    return root / "arms" / name


def arm_settings(settings: Settings, experiment: Experiment, name: str) -> Settings:
    """The settings of an arm: a changed stage 1, evaluated on vanilla's greedy answers. Raises UserError."""
    if name not in experiment.arms:
        raise UserError(f"--arms {name}: no such arm; use {', '.join(experiment.arms) or 'none'}")
    first, stage = next(iter(settings.training.stages.items()))
    try:
        changed: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(stage), experiment.arms[name]))
    except OmegaConfBaseException as error:
        raise UserError(f"config key experiment.arms.{name}: {first_line(error)}") from error
    assert isinstance(changed, StageSettings)
    methods = [MethodSettings(method, prompts=experiment.arm_prompts) for method in ("vanilla", FORCED)]
    evaluation = replace(settings.evaluation, methods=methods, draft=None)
    training = TrainingSettings({first: changed}, settings.training.evaluation_rows)
    return replace(settings, training=training, probes={}, evaluation=evaluation)


def train_arm(settings: Settings, experiment: Experiment, root: Path, name: str) -> None:
    """Train and evaluate an arm, unless it is finished, on the text of the recipe."""
    arm, folder = arm_settings(settings, experiment, name), arm_folder(root, name)
    share_text(root, folder)
    write_atomically(settings_file(folder), settings_yaml(arm))
    train(next(iter(arm.training.stages)), arm, folder)
    evaluate(arm, folder)


def share_text(root: Path, folder: Path) -> None:
    """Make the folder of an arm, in which links stand for the text of the recipe."""
    folder.mkdir(parents=True, exist_ok=True)
    for part in TEXT:
        (root / part).mkdir(parents=True, exist_ok=True)
        if not (folder / part).exists():
            (folder / part).symlink_to((root / part).absolute())


def arm_figures(experiment: Experiment, root: Path) -> dict[str, float]:
    """Teacher-forced tokens per round over all tasks, by arm."""
    figures = {}
    for name in experiment.arms:
        lines = [line for line in read_samples(evaluation_folder(arm_folder(root, name))) if "bound" in line]
        if rounds := sum(line["rounds"] for line in lines):
            figures[name] = sum(line["decoded_tokens"] for line in lines) / rounds
    return figures


def arm_table(settings: Settings, experiment: Experiment, root: Path) -> pandas.DataFrame:
    """One row per finished arm."""
    figures, rows = arm_figures(experiment, root), []
    for name in experiment.arms:
        arm = arm_settings(settings, experiment, name)
        ((stage, changed),) = arm.training.stages.items()
        row = stage_row(run_folder(arm_folder(root, name), arm.seed) / stage, changed)
        if row:
            rows.append({"arm": name, "tokens per round, teacher-forced": figures.get(name)} | row)
    return pandas.DataFrame(rows)


def write_results(settings: Settings, experiment: Experiment, root: Path, command: str) -> None:
    """Write the page with goals, claims and arms, and the samples without their tokens."""
    lines, folder = measured(root), Path(experiment.report or root / "report")
    samples = Samples.of_lines(lines)
    goals = [goal_verdict(samples, goal) for goal in experiment.goals]
    claims = paper_claims(samples, arm_figures(experiment, root))
    more: Tables = {
        "Goals": (
            "The goals set for this pair. Outputs without repetition loops.",
            pandas.DataFrame(goals, columns=Verdict._fields),
        ),
        "Claims of the paper": (
            "The paper's target models have 7B to 32B parameters.",
            pandas.DataFrame(claims, columns=Verdict._fields),
        ),
        "Arms": (
            "A short stage 1 with one change each. The trainer's evaluation drafts chains of the depth that the "
            "variant trains; the trees are teacher-forced on greedy answers of the test.",
            arm_table(settings, experiment, root),
        ),
    }
    write_page(folder / "README.md", Path(settings.target).name, settings, root, command, more)
    kept = ({name: value for name, value in line.items() if name != "token_ids"} for line in lines)
    write_atomically(folder / "samples.jsonl", "".join(json.dumps(line) + "\n" for line in kept))
    print(f"report: {folder / 'README.md'}")
