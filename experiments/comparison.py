"""The arms of `experiments.drafts`: their settings, training and measurement."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from omegaconf import MISSING

from experiments.arms import read_section, share_text
from longspec.errors import UserError
from longspec.pipeline.cells import read_samples
from longspec.pipeline.evaluation import evaluate, evaluation_folder
from longspec.pipeline.files import settings_file
from longspec.pipeline.settings import MethodSettings, Settings, check_settings, settings_yaml
from longspec.pipeline.training import run_folder, stage_row, train
from longspec.replacing import write_atomically

BASELINES = "samples-baselines.jsonl"
"""The baselines' samples, next to those of each arm."""


@dataclass
class Arm:
    """A draft to train and measure."""

    architecture: str = "glide"
    options: dict[str, Any] = field(default_factory=dict)
    """Options of another architecture than GLIDE."""
    overrides: dict[str, Any] = field(default_factory=dict)
    """Values of the trainer's configuration for the first stage, by full key."""
    micro_batch: int | None = None
    """Largest number of rows per forward pass in any stage; None for that of the stage."""
    like: str | None = None
    """Arm whose fields above it has, with as many steps as take the seconds of the arm `seconds_of`."""
    seconds_of: str | None = None


@dataclass
class Comparison:
    """The section `experiment`."""

    report: str = MISSING
    arms: dict[str, Arm] = field(default_factory=dict)
    baselines: list[MethodSettings] = field(default_factory=list)
    methods: list[MethodSettings] = field(default_factory=list)


def read_comparison(settings: Settings) -> Comparison:
    """The section `experiment` of `longspec draft`'s settings. Raises UserError that names an invalid key."""
    comparison = read_section(Comparison, settings)
    for name, arm in comparison.arms.items():
        for key, other in (("like", arm.like), ("seconds_of", arm.seconds_of)):
            if (arm.like is None) != (arm.seconds_of is None) or other not in (None, *comparison.arms):
                raise UserError(f"config key experiment.arms.{name}.{key}: name two other arms in like and seconds_of")
        check_settings(arm_settings(settings, comparison, name, 0))
    return comparison


def arm_settings(
    settings: Settings, comparison: Comparison, name: str, seed: int, steps: Sequence[int] = ()
) -> Settings:
    """The settings of an arm with a seed. steps: number of steps of each stage; empty keeps those in `settings`."""
    arm = comparison.arms[name]
    arm = arm if arm.like is None else comparison.arms[arm.like]
    stages = dict(settings.training.stages)
    for number, (key, stage) in enumerate(stages.items()):
        limit = stage.micro_batch if arm.micro_batch is None else min(arm.micro_batch, stage.micro_batch)
        changes = arm.overrides if number == 0 else {}
        own_steps = steps[number] if steps else stage.steps
        stages[key] = replace(stage, micro_batch=limit, steps=own_steps, overrides=stage.overrides | changes)
    training = replace(
        settings.training, stages=stages, architecture=arm.architecture, architecture_options=arm.options
    )
    evaluation = replace(settings.evaluation, methods=comparison.methods, draft=None)
    return replace(settings, seed=seed, training=training, evaluation=evaluation, probes={})


def arm_folder(root: Path, name: str, seed: int) -> Path:
    return root / "arms" / f"{name}-{seed}"


def train_arm(settings: Settings, comparison: Comparison, root: Path, name: str, seed: int) -> None:
    """Train an arm with a seed, unless it is finished."""
    folder = arm_folder(root, name, seed)
    share_text(root, folder)
    own = arm_settings(settings, comparison, name, seed, equal_steps(settings, comparison, root, name, seed))
    for stage in own.training.stages:
        train(stage, own, folder)


def measure_arm(settings: Settings, comparison: Comparison, root: Path, name: str, seed: int) -> None:
    """Measure an arm with a seed, unless it is measured. The first one also measures the baselines."""
    folder, own = arm_folder(root, name, seed), arm_settings(settings, comparison, name, seed)

    def measure(methods: list[MethodSettings]) -> None:
        changed = replace(own, evaluation=replace(own.evaluation, methods=methods))
        write_atomically(settings_file(folder), settings_yaml(changed))  # the processes on the GPUs read it
        evaluate(changed, folder)

    shared = root / BASELINES
    if not shared.exists():
        measure(comparison.baselines)
        names = {method.name for method in comparison.baselines}
        lines = [line for line in read_samples(evaluation_folder(folder)) if line["method"] in names]
        write_atomically(shared, "".join(json.dumps(line) + "\n" for line in lines))
    copy = evaluation_folder(folder) / BASELINES
    if not copy.exists():
        write_atomically(copy, shared.read_text(), make_folder=True)
    measure(comparison.methods)


def equal_steps(settings: Settings, comparison: Comparison, root: Path, name: str, seed: int) -> list[int]:
    """Steps of each stage in which the arm `like` takes the seconds of `seconds_of`; empty for an arm without them.

    All seeds have those of the lowest seed that is trained: speed does not depend on the seed, and so the other runs
    may share a GPU. Raises UserError if these arms are not trained yet.
    """
    arm = comparison.arms[name]
    if arm.like is None or arm.seconds_of is None:
        return []
    steps = []
    for stage, planned in settings.training.stages.items():
        seconds = []
        for other in (arm.like, arm.seconds_of):
            folders = [run_folder(arm_folder(root, other, run), run) / stage for run in range(seed + 1)]
            rows = [row for folder in folders if (row := stage_row(folder, planned))]
            if not rows:
                raise UserError(f"--arms {name}: arm {other} is not trained with seed {seed}; train it first")
            seconds.append(rows[0]["seconds per step"])
        steps.append(max(1, round(planned.steps * seconds[1] / seconds[0])))
    return steps
