"""The arms of `experiments.drafts`: their settings, training and measurement."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from experiments.arms import read_section, share_text
from longspec.errors import UserError
from longspec.inference.registry import choose_pair
from longspec.models.draft_layer import GLIDE
from longspec.models.target_files import read_config
from longspec.pipeline.cells import SampleFile
from longspec.pipeline.evaluation import claim_samples, evaluation_folder, measure
from longspec.pipeline.settings import FORCED, MethodSettings, Settings, check_settings
from longspec.pipeline.training import check_begun, check_trainer, is_finished, run_folder, stage_row, train
from longspec.ranks.replicas import Replicas
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
    later_overrides: dict[str, Any] = field(default_factory=dict)
    """The same for the other stages, which start from a draft."""
    like: str | None = None
    """Arm whose fields above it has, with as many steps as take the seconds of the arm `seconds_of`."""
    seconds_of: str | None = None
    seeds: int | None = None
    """Number of seeds that train it, the first ones; None for all."""


@dataclass
class Comparison:
    """The section `experiment`."""

    report: str | None = None
    """Folder of the results page; None for `report` in the output folder."""
    arms: dict[str, Arm] = field(default_factory=dict)
    baselines: list[MethodSettings] = field(default_factory=list)
    """Methods without a draft, measured once. Vanilla's greedy answers are those of the methods `forced`."""
    forced: list[MethodSettings] = field(default_factory=list)
    """Teacher-forced methods, measured with each seed."""
    decoding: list[MethodSettings] = field(default_factory=list)
    """Methods that decode for the time per round, with the drafts of the first seed (see `decoded_arms`)."""
    jobs_per_gpu: int = 1
    """Trainings and teacher-forced measurements that share a GPU. Whatever is timed has a GPU to itself."""


def runs(comparison: Comparison, names: Iterable[str], seeds: Iterable[int]) -> Iterator[tuple[int, list[str]]]:
    """Each seed, in ascending order, and those of the arms that train with it."""
    for number, seed in enumerate(sorted(set(seeds))):
        yield seed, [name for name in names if number < (comparison.arms[name].seeds or number + 1)]


def read_comparison(settings: Settings) -> Comparison:
    """The section `experiment` of `longspec draft`'s settings. Raises UserError that names an invalid key."""
    comparison = read_section(Comparison, settings)
    for name, arm in comparison.arms.items():
        for key, other in (("like", arm.like), ("seconds_of", arm.seconds_of)):
            if (arm.like is None) != (arm.seconds_of is None) or other not in (None, *comparison.arms):
                raise UserError(f"config key experiment.arms.{name}.{key}: name two other arms in like and seconds_of")
        if arm.architecture == GLIDE and arm.options:
            raise UserError(f"config key experiment.arms.{name}.options: not for glide; give architecture, too")
        check_settings(arm_settings(settings, comparison, name, 0))
    for key in ("forced", "decoding"):
        for method in getattr(comparison, key):
            if (method.kind == FORCED) != (key == "forced"):
                raise UserError(f"config key experiment.{key}: {method.name} belongs to the other list of methods")
    return comparison


def check_arms(
    settings: Settings, comparison: Comparison, root: Path, names: Sequence[str], seeds: Sequence[int]
) -> None:
    """Raise UserError for arms that cannot be trained: unknown ones, some that the trainer refuses, and those that take
    the seconds of an arm that is neither named nor trained."""
    path = choose_pair(settings.target).target
    for name in names:
        if name not in comparison.arms:
            raise UserError(f"--arms {name}: no such arm; use {', '.join(comparison.arms)}")
        try:
            check_trainer(arm_settings(settings, comparison, name, 0), read_config(path), path)
        except UserError as error:
            raise UserError(f"arm {name}: {error}") from error
        for other in filter(None, (comparison.arms[name].like, comparison.arms[name].seconds_of)):
            if other not in names and seconds_per_step(settings, comparison, root, other, min(seeds)) is None:
                raise UserError(f"--arms {name}: needs the seconds per step of {other}; name that arm, too")


def arm_settings(
    settings: Settings, comparison: Comparison, name: str, seed: int, steps: Sequence[int] = ()
) -> Settings:
    """The settings of an arm with a seed. steps: number of steps of each stage; empty keeps those in `settings`."""
    arm = comparison.arms[comparison.arms[name].like or name]
    stages = dict(settings.training.stages)
    for number, (key, stage) in enumerate(stages.items()):
        changes = arm.later_overrides if number else arm.overrides
        own_steps = steps[number] if steps else stage.steps
        stages[key] = replace(stage, steps=own_steps, overrides=stage.overrides | changes)
    training = replace(
        settings.training, stages=stages, architecture=arm.architecture, architecture_options=arm.options
    )
    evaluation = replace(settings.evaluation, methods=[*comparison.forced, *comparison.decoding], draft=None)
    return replace(settings, seed=seed, training=training, evaluation=evaluation, probes={})


def check_unchanged(
    settings: Settings, comparison: Comparison, root: Path, names: Sequence[str], seeds: Sequence[int]
) -> None:
    """Raise OtherSettings for arms that an earlier run began with other settings. Arms with `like`, whose steps depend
    on other arms, are compared when they train."""
    for seed, own_names in runs(comparison, names, seeds):
        for name in (name for name in own_names if comparison.arms[name].like is None):
            own = arm_settings(settings, comparison, name, seed)
            for stage in own.training.stages:
                check_begun(stage, own, arm_folder(root, name, seed))


def with_methods(settings: Settings, methods: list[MethodSettings]) -> Settings:
    """The settings with other methods, measured with the draft that the settings train."""
    return replace(settings, evaluation=replace(settings.evaluation, methods=methods, draft=None))


def baseline_settings(settings: Settings, comparison: Comparison) -> Settings:
    """The settings of the baselines, which wait for no draft."""
    return with_methods(replace(settings, training=replace(settings.training, stages={})), comparison.baselines)


def arm_folder(root: Path, name: str, seed: int) -> Path:
    return root / "arms" / f"{name}-{seed}"


def baselines_folder(root: Path) -> Path:
    return root / "baselines"


def trained_settings(settings: Settings, comparison: Comparison, root: Path, name: str, seed: int) -> Settings:
    """The settings of an arm with the steps that it trains. Raises UserError as `equal_steps` does."""
    return arm_settings(settings, comparison, name, seed, equal_steps(settings, comparison, root, name, seed))


def find_trained(settings: Settings, comparison: Comparison, root: Path, name: str, seed: int) -> Settings | None:
    """The settings of an arm whose stages are finished; None for another one."""
    try:
        own = trained_settings(settings, comparison, root, name, seed)
    except UserError:
        return None
    run = run_folder(arm_folder(root, name, seed), seed)
    return own if all(is_finished(run / key, stage) for key, stage in own.training.stages.items()) else None


def train_stages(own: Settings, root: Path, folder: Path) -> None:
    """Train the stages that are not finished, on the text in `root`."""
    share_text(root, folder)
    for stage in own.training.stages:
        train(stage, own, folder)


def measure_missing(own: Settings, root: Path, folder: Path) -> None:
    """Measure the missing samples in this process. The baselines' samples lie next to them, once they exist."""
    share_text(root, folder)
    shared = SampleFile(evaluation_folder(baselines_folder(root))).path
    if folder != baselines_folder(root) and shared.exists():
        write_atomically(evaluation_folder(folder) / BASELINES, shared.read_bytes(), make_folder=True)
    if claim_samples(own, folder):
        measure(own, folder, Replicas())


def seconds_per_step(
    settings: Settings, comparison: Comparison, root: Path, name: str, seed: int
) -> list[float] | None:
    """The median of each stage of an arm of which another one takes the seconds; None for other arms, and if no seed up
    to this one is trained. The first seed trains with a GPU to itself, and all seeds have its speed."""
    if name not in timed_arms(comparison):
        return None
    own = arm_settings(settings, comparison, name, seed)
    for run in range(seed + 1):
        folder = run_folder(arm_folder(root, name, run), run)
        rows = [row for key, stage in own.training.stages.items() if (row := stage_row(folder / key, stage))]
        if len(rows) == len(own.training.stages):
            return [row["seconds per step"] for row in rows]
    return None


def timed_arms(comparison: Comparison) -> set[str]:
    """The arms whose seconds per step decide how many steps another one trains."""
    return {name for arm in comparison.arms.values() for name in (arm.like, arm.seconds_of) if name is not None}


def decoded_arms(comparison: Comparison, names: Iterable[str]) -> list[str]:
    """Those of the arms whose rounds are timed. Of arms that differ only in training, it is the first one."""
    chosen: dict[str, str] = {}
    for name in names:
        arm = comparison.arms[comparison.arms[name].like or name]
        model = {key: value for key, value in arm.overrides.items() if key.startswith("model.")}
        chosen.setdefault(repr((arm.architecture, arm.options, model)), name)
    return list(chosen.values())


def equal_steps(settings: Settings, comparison: Comparison, root: Path, name: str, seed: int) -> list[int]:
    """Steps of each stage in which the arm `like` takes the seconds of `seconds_of`; empty for an arm without them.
    Raises UserError if these arms are not trained yet."""
    arm, speeds = comparison.arms[name], []
    if arm.like is None or arm.seconds_of is None:
        return []
    for other in (arm.like, arm.seconds_of):
        if (own := seconds_per_step(settings, comparison, root, other, seed)) is None:
            raise UserError(f"--arms {name}: arm {other} is not trained up to seed {seed}; train it first")
        speeds.append(own)
    planned = [stage.steps for stage in settings.training.stages.values()]
    return [max(1, round(steps * b / a)) for steps, a, b in zip(planned, *speeds, strict=True)]
