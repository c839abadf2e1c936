"""The training stages, each by the trainer's own command line and from the draft of the stage before."""

import statistics
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pandas
import torch
from omegaconf import OmegaConf
from transformers import PreTrainedConfig

from longspec.cli.train import CONFIGS, ROOT, TRAINER
from longspec.errors import UserError
from longspec.inference.registry import choose_pair
from longspec.models.draft_layer import GLIDE, OPTION_KEYS
from longspec.pipeline.cells import check_methods
from longspec.pipeline.files import answer_files, claim, read_jsonl, training_files
from longspec.pipeline.induction import chosen_layer
from longspec.pipeline.probes import adopted
from longspec.pipeline.processes import hydra_overrides, launch, launch_line
from longspec.pipeline.settings import Settings, StageSettings, TrainingSettings
from longspec.train.config import compose_config, typed_with_auto
from longspec.train.config_checks import check
from longspec.train.config_schema import MODEL_DEFAULTS
from longspec.train.generations import DRAFTS, METRICS_NAME, marker_of
from longspec.train.inputs import check_fit

CHECKPOINT, FACTS = DRAFTS[1], "settings.json"
SHOWN = ("eval_acceptance_length", "eval_loss", "eval_top1_lag_1", "loss")


def train(name: str, settings: Settings, root: Path) -> None:
    """Train a stage from the draft before it or a fresh one, or resume it. Raises UserError for other settings."""
    stage, stages = _chosen(name, settings, root), list(settings.training.stages)
    folder = run_folder(root, settings.seed) / name
    draft = None
    if name != stages[0]:
        draft = str((folder.parent / stages[stages.index(name) - 1] / CHECKPOINT).absolute())
    ranks, micro_batch, accumulation = batches(name, stage)
    overrides: dict[str, Any] = {
        "model_name_or_path": choose_pair(settings.target).target,
        "draft_model_name_or_path": draft,
        "output_dir": str(folder.absolute()),
        "resume": "latest",
        "seed": settings.seed,
        "data.files": training_files(root, stage),
        "data.max_length": stage.max_length,
        "data.cache_dir": str((root / "cache").absolute()),
        "evaluation.files": answer_files(root, [*stage.answers, *stage.replay], "validation"),
        "evaluation.rows": settings.training.evaluation_rows,
        "evaluation.steps": stage.steps,
        "max_steps": stage.steps,
        "save_steps": -(-stage.steps // 4),  # at most four saves, the last one after the last step
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "wandb.mode": "disabled",
        **stage.overrides,
    }

    claim(folder / FACTS, stage_facts(stage, settings.seed))
    if is_finished(folder, stage):
        return

    seconds = launch(launch_line(stage.config, overrides, ranks), folder, stage.last_step)
    if not is_finished(folder, stage):
        raise UserError(f"{folder}: training ended before its last step; see {folder / 'log.txt'}")
    with (folder / "seconds.jsonl").open("a") as times:
        times.write(f"{seconds:.1f}\n")


def check_begun(name: str, settings: Settings, root: Path) -> None:
    """Raise OtherSettings for a stage that was begun with other settings."""
    file = run_folder(root, settings.seed) / name / FACTS
    if file.exists():
        claim(file, stage_facts(_chosen(name, settings, root), settings.seed))


def _chosen(name: str, settings: Settings, root: Path) -> StageSettings:
    """A stage; the first one with the architecture, and with the layer and the probes' values chosen for its draft."""
    stage = settings.training.stages[name]
    if name != next(iter(settings.training.stages)):
        return stage
    layer = chosen_layer(root) if settings.training.choose_layer else {}
    # The sizes chosen for a target are options of GLIDE; those of another architecture replace them.
    chosen = adopted(settings, root) | _architecture(settings.training)
    return replace(stage, overrides=layer | stage.overrides | chosen)


def check_trainer(
    settings: Settings, config: PreTrainedConfig, path: str, given: Mapping[str, Any] | None = None
) -> None:
    """Check the trainer's configuration of every stage and candidate, for a target with `config` at `path`, and the
    methods that measure the draft.

    given: values that replace those of the trainer's config, but not those of the settings. Raises UserError with the
    key in the settings.
    """
    for number, (name, stage) in enumerate(settings.training.stages.items()):
        # The text does not exist yet, and any files stand for it.
        values: dict[str, Any] = {"data.files": [str(ROOT / TRAINER)], "evaluation.files": [__file__]}
        values |= {"model_name_or_path": path, "draft_model_name_or_path": "draft" if number else None}
        values |= {"data.max_length": stage.max_length, "max_steps": stage.steps, "resume": "latest"}
        architecture = {} if number else _architecture(settings.training)
        values |= {**(given or {}), **stage.overrides, **architecture}
        changes: dict[str, dict[str, Any]] = {f"training.stages.{name}.overrides": {}}
        if number == 0:
            for own, probe in settings.probes.items():
                changes[f"probes.{own}.shared"] = probe.shared
                for candidate, keys in probe.candidates.items():
                    changes[f"probes.{own}.candidates.{candidate}"] = probe.shared | keys
        ranks, *_ = batches(name, stage)
        for section, changed in changes.items():
            try:
                composed = compose_config(ROOT / CONFIGS, stage.config, hydra_overrides(values | changed))
                check(trained := typed_with_auto(composed, ranks))
                check_fit(trained, config)
                if trained.max_steps is None:
                    raise UserError("config key max_steps: null; omit it for the number of the key steps")
            except UserError as error:
                problem = str(error).replace("config key ", f"config key {section}.", 1)
                if architecture:
                    problem = problem.replace(f"{section}.model.architecture", "training.architecture")
                raise UserError(problem) from error
            if number == 0 and not changed and settings.evaluation.draft is None:
                check_methods(settings.evaluation, config.vocab_size, trained.model.draft_options.window)


def _architecture(training: TrainingSettings) -> dict[str, Any]:
    """The trainer's values for a fresh draft of another architecture than GLIDE, in place of GLIDE's options."""
    if training.architecture == GLIDE:
        return {}
    named = {"architecture": training.architecture, "architecture_options": training.architecture_options}
    options = {name: MODEL_DEFAULTS[name] for name in OPTION_KEYS}
    return {f"model.{name}": value for name, value in (options | named).items()}


def run_folder(root: Path, seed: int) -> Path:
    return root / "training" / f"recipe-{seed}"


def final_draft(settings: Settings, root: Path) -> Path:
    """Path of the draft after the last stage."""
    return run_folder(root, settings.seed) / list(settings.training.stages)[-1] / CHECKPOINT


def stage_facts(stage: StageSettings, seed: int) -> dict[str, Any]:
    """What determines a stage's draft besides its text and its first draft: its settings and the trainer's config."""
    config = OmegaConf.to_container(compose_config(ROOT / CONFIGS, stage.config))
    values = pandas.json_normalize(config).to_dict("records")[0]  # type: ignore[arg-type]
    return asdict(stage) | {"seed": seed} | {f"trainer.{key}": value for key, value in values.items()}


def batches(name: str, stage: StageSettings) -> tuple[int, int, int]:
    """Number of ranks, rows per micro-batch and micro-batches per step on each rank.

    As many ranks as there are GPUs, or the next smaller number that divides the rows of a step. Raises UserError for
    tokens_per_step that are not whole rows. name: the stage, for the message.
    """
    rows, remainder = divmod(stage.tokens_per_step, stage.max_length)
    if remainder or not rows:
        problem = f"tokens_per_step {stage.tokens_per_step} is not a multiple of max_length {stage.max_length}"
        raise UserError(f"training.stages.{name}: {problem}")
    ranks = _divisor(rows, torch.cuda.device_count())
    micro_batch = _divisor(rows // ranks, stage.micro_batch)
    return ranks, micro_batch, rows // ranks // micro_batch


def _divisor(number: int, limit: int) -> int:
    """The largest divisor up to `limit`, at least 1."""
    return max(size for size in range(1, max(1, limit) + 1) if number % size == 0)


def is_finished(folder: Path, stage: StageSettings) -> bool:
    """Whether the checkpoint of the last step is saved. Its metrics are written before."""
    return (folder / METRICS_NAME).exists() and marker_of(folder / CHECKPOINT).step >= stage.last_step


def stage_row(folder: Path, stage: StageSettings) -> dict[str, Any] | None:
    """Steps, seconds and the trainer's evaluation after the last step; None for a stage that is not finished."""
    if not is_finished(folder, stage):
        return None
    metrics = read_jsonl(folder / METRICS_NAME)
    times = folder / "seconds.jsonl"
    row: dict[str, Any] = {"stage": folder.name, "steps": stage.last_step, "tokens per step": stage.tokens_per_step}
    row["seconds"] = sum(map(float, times.read_text().split())) if times.exists() else None
    row["seconds per step"] = statistics.median(line["seconds"] for line in metrics)
    return row | {key: metrics[-1].get(key) for key in SHOWN}


def stage_table(settings: Settings, root: Path) -> pandas.DataFrame:
    """One row per finished stage."""
    folder = run_folder(root, settings.seed)
    rows = [stage_row(folder / name, stage) for name, stage in settings.training.stages.items()]
    return pandas.DataFrame([row for row in rows if row])
