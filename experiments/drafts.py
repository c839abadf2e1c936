"""Drafts of several architectures on the same text: `python -m experiments.drafts --config FILE [--output_dir DIR]`.

One command writes the text, trains and measures every arm with every seed, and writes the page. It continues where an
earlier run stopped. Section `experiment` of the settings:

    arms       drafts: architecture and options, values of the trainer's configuration for stage 1, and limits
    baselines  methods without a draft, measured once
    methods    methods measured with each draft
"""

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from longspec.errors import UserError, first_line, reports_user_errors
from longspec.extras import demo_extra
from longspec.signals import StopSignals

TEXT = ("prompts", "answers", "cache")
"""Folders that all arms share."""
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

    report: str = "???"
    arms: dict[str, Arm] = field(default_factory=dict)
    baselines: list[Any] = field(default_factory=list)
    methods: list[Any] = field(default_factory=list)


def read_comparison(settings: Any) -> Comparison:
    """The section `experiment` of `longspec draft`'s settings. Raises UserError that names an invalid key."""
    from omegaconf import OmegaConf
    from omegaconf.errors import OmegaConfBaseException

    from longspec.pipeline.settings import MethodSettings, check_settings

    try:
        merged = OmegaConf.merge(OmegaConf.structured(Comparison), settings.experiment)
        comparison: Any = OmegaConf.to_object(merged)
        for part in ("baselines", "methods"):
            entries = [OmegaConf.merge(OmegaConf.structured(MethodSettings), one) for one in getattr(comparison, part)]
            setattr(comparison, part, [OmegaConf.to_object(entry) for entry in entries])
    except OmegaConfBaseException as error:
        raise UserError(f"config key experiment.{getattr(error, 'full_key', '')}: {first_line(error)}") from error
    for name, arm in comparison.arms.items():
        for key, other in (("like", arm.like), ("seconds_of", arm.seconds_of)):
            if (arm.like is None) != (arm.seconds_of is None) or other not in (None, *comparison.arms):
                raise UserError(f"config key experiment.arms.{name}.{key}: name two other arms in like and seconds_of")
        check_settings(arm_settings(settings, comparison, name, 0))
    return comparison


def arm_settings(settings: Any, comparison: Comparison, name: str, seed: int, steps: Sequence[int] = ()) -> Any:
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


def train_arm(settings: Any, comparison: Comparison, root: Path, name: str, seed: int) -> None:
    """Train an arm with a seed, unless it is finished."""
    from longspec.pipeline.training import train

    folder = arm_folder(root, name, seed)
    folder.mkdir(parents=True, exist_ok=True)
    for part in TEXT:
        (root / part).mkdir(parents=True, exist_ok=True)
        if not (folder / part).exists():
            (folder / part).symlink_to((root / part).absolute())
    own = arm_settings(settings, comparison, name, seed, equal_steps(settings, comparison, root, name, seed))
    for stage in own.training.stages:
        train(stage, own, folder)


def measure_arm(settings: Any, comparison: Comparison, root: Path, name: str, seed: int) -> None:
    """Measure an arm with a seed, unless it is measured. The first one also measures the baselines."""
    from longspec.pipeline.cells import read_samples
    from longspec.pipeline.evaluation import evaluate, evaluation_folder
    from longspec.pipeline.files import settings_file, write_atomically
    from longspec.pipeline.settings import settings_yaml

    folder, own = arm_folder(root, name, seed), arm_settings(settings, comparison, name, seed)

    def measure(methods: list[Any]) -> None:
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
        write_atomically(copy, shared.read_text())
    measure(comparison.methods)


def equal_steps(settings: Any, comparison: Comparison, root: Path, name: str, seed: int) -> list[int]:
    """Steps of each stage in which the arm `like` takes the seconds of `seconds_of`; empty for an arm without them.

    All seeds have those of the lowest seed that is trained: speed does not depend on the seed, and so the other runs
    may share a GPU. Raises UserError if these arms are not trained yet.
    """
    from longspec.pipeline.training import run_folder, stage_row

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


@reports_user_errors
def main(argv: Sequence[str] | None = None) -> None:
    """Run what is missing, and write the page of what is there."""
    parser = argparse.ArgumentParser(prog="python -m experiments.drafts", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--config", default="experiments/drafts_smollm2.yaml", help="settings")
    parser.add_argument("--output_dir", help="default: outputs/drafts-TARGET")
    parser.add_argument("--seeds", nargs="*", type=int, default=[0], help="default: 0")
    parser.add_argument("--arms", nargs="*", metavar="NAME", help="arms to train, default: all; none: only the page")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="settings that replace those of the file")
    options = parser.parse_intermixed_args(argv)
    with demo_extra():
        from experiments.drafts_page import write_results
        from longspec.locks import locked
        from longspec.pipeline.answers import CHAT
        from longspec.pipeline.files import settings_file, write_atomically
        from longspec.pipeline.run import steps_of
        from longspec.pipeline.settings import load_settings, settings_yaml

    settings = load_settings(options.config, options.overrides)
    comparison = read_comparison(settings)
    root = Path(options.output_dir or f"outputs/drafts-{Path(settings.target).name}")
    chosen = list(comparison.arms) if options.arms is None else options.arms
    if unknown := sorted(set(chosen) - set(comparison.arms)):
        raise UserError(f"--arms {unknown[0]}: no such arm; use {', '.join(comparison.arms)}")
    root.mkdir(parents=True, exist_ok=True)
    with StopSignals(at_once=True), locked(root):
        write_atomically(settings_file(root), settings_yaml(settings))
        text = steps_of(settings, root)
        for step in (CHAT, "prompts", "answers"):
            if chosen and step in text:
                print(f"text: {step}", flush=True)
                text[step]()
        for seed in options.seeds:
            for name in chosen:
                print(f"arm {name}, seed {seed}", flush=True)
                train_arm(settings, comparison, root, name, seed)
                measure_arm(settings, comparison, root, name, seed)
        command = shlex.join(["python", "-m", "experiments.drafts", *(sys.argv[1:] if argv is None else argv)])
        print(f"report: {write_results(settings, comparison, root, command)}")


if __name__ == "__main__":
    main()
