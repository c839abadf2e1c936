"""Step `train`: the recipe with every seed, and the ablation arms, by the trainer's own command line."""

import json
import os
import subprocess
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas
import torch
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm

from experiments.files import answers_file, claim, read_jsonl, write_atomically
from experiments.processes import free_port, running
from experiments.settings import EVERY, RECIPE, Settings, StageSettings, check_data
from experiments.tables import markdown
from experiments.target import TargetText
from longspec.cli.train import CONFIGS, ROOT
from longspec.cli.train import launch_line as trainer_line
from longspec.errors import UserError, first_line

METRICS, CHECKPOINT, SETTINGS = "metrics.jsonl", "checkpoint-last", "settings.json"
RECIPE_TABLE = "recipe"
SHOWN = ("eval_acceptance_length", "eval_loss", "eval_top1_lag_1", "loss")
LAST_LINES = 15


def train(settings: Settings, root: Path) -> None:
    """Train the missing runs, the recipe first, and write the table of arms after each of them.

    Raises UserError for invalid settings of any run before the first one starts.
    """
    target = TargetText.load(settings.target).path
    runs = {(arm, seed): arm_stages(settings, arm) for arm, seed in all_runs(settings)}
    for stages in runs.values():
        for name, stage in stages.items():
            batches(name, stage)
            answer_files(root, stage.answers, "train")
            answer_files(root, stage.answers, "validation")

    for (arm, seed), stages in runs.items():
        if settings.training.only and arm not in settings.training.only:
            continue
        draft: Path | None = None
        for name, stage in stages.items():
            folder = run_folder(root, arm, seed) / name
            train_stage(folder, stage, settings, root, target, draft, seed)
            draft = folder / CHECKPOINT
        write_table(settings, root)


def all_runs(settings: Settings) -> list[tuple[str, int]]:
    """Arm and seed of every run: the recipe with all seeds, then the ablation arms with the first seed."""
    seeds = settings.training.seeds
    return [(RECIPE, seed) for seed in seeds] + [(arm, seeds[0]) for arm in settings.training.arms]


def run_folder(root: Path, arm: str, seed: int) -> Path:
    return root / "training" / f"{arm}-{seed}"


def final_draft(settings: Settings, root: Path, arm: str = RECIPE, seed: int | None = None) -> Path:
    """Path of the draft after the last stage of a run. seed: None for the first one."""
    seed = settings.training.seeds[0] if seed is None else seed
    return run_folder(root, arm, seed) / list(arm_stages(settings, arm))[-1] / CHECKPOINT


def arm_stages(settings: Settings, arm: str) -> dict[str, StageSettings]:
    """The stages of an arm, in order. Raises UserError if the arm names an unknown stage, key or run."""
    changes = dict(settings.training.arms.get(arm, {}))
    every = changes.pop(EVERY, {})
    if unknown := sorted(set(changes) - set(settings.training.stages)):
        raise UserError(f"config key training.arms.{arm}.{unknown[0]}: no such stage; use {EVERY} or a stage's name")
    stages: dict[str, Any] = {}
    for name, stage in settings.training.stages.items():
        if name in changes and changes[name] is None:
            continue
        try:
            merged = OmegaConf.merge(OmegaConf.structured(stage), every, changes.get(name, {}))
            stages[name] = OmegaConf.to_object(merged)
        except OmegaConfBaseException as error:
            raise UserError(f"config key training.arms.{arm}: {first_line(error)}") from error
        check_data(settings, stages[name], f"training.arms.{arm}.{name}")
    if not stages:
        raise UserError(f"config key training.arms.{arm}: no stage is left")
    return stages


def train_stage(
    folder: Path, stage: StageSettings, settings: Settings, root: Path, target: str, draft: Path | None, seed: int
) -> None:
    """Train one stage, starting from `draft` or, if None, from a fresh draft. An interrupted stage resumes.

    Raises UserError if `folder` was made with other settings or the training fails.
    """
    ranks, micro_batch, accumulation = batches(folder.name, stage)
    overrides: dict[str, Any] = {
        "model_name_or_path": target,
        "draft_model_name_or_path": str(draft.absolute()) if draft else None,
        "output_dir": str(folder.absolute()),
        "resume": "latest",
        "seed": seed,
        "data.files": training_files(root, stage),
        "data.max_length": stage.max_length,
        "data.cache_dir": str((root / "cache").absolute()),
        "evaluation.files": answer_files(root, [*stage.answers, *stage.replay], "validation"),
        "evaluation.rows": settings.training.evaluation_rows,
        "evaluation.steps": stage.steps,
        "max_steps": stage.steps,
        "save_steps": max(1, stage.steps // 4),
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": accumulation,
        "wandb.mode": "disabled",
        **stage.overrides,
    }

    claim(folder / SETTINGS, stage_facts(stage, seed))
    steps = overrides["max_steps"]  # stage.overrides may replace it
    if is_finished(folder, steps):
        return

    seconds = launch(launch_line(stage.config, overrides, ranks), folder, steps)
    if not is_finished(folder, steps):
        raise UserError(f"{folder}: training ended before its last step; see {folder / 'log.txt'}")
    with (folder / "seconds.jsonl").open("a") as times:
        times.write(f"{seconds:.1f}\n")


def stage_facts(stage: StageSettings, seed: int) -> dict[str, Any]:
    """What determines a stage's draft besides its text and its first draft: its settings and the trainer's config."""
    from longspec.train.config import compose_config  # reports and evaluations do not need Hydra

    config = OmegaConf.to_container(compose_config(ROOT / CONFIGS, stage.config))
    values = pandas.json_normalize(config).to_dict("records")[0]  # type: ignore[arg-type]
    return asdict(stage) | {"seed": seed} | {f"trainer.{key}": value for key, value in values.items()}


def batches(name: str, stage: StageSettings) -> tuple[int, int, int]:
    """Number of ranks, rows per micro-batch and micro-batches per step on each rank.

    Raises UserError if tokens_per_step does not divide evenly. name: the stage, for the message.
    """
    ranks = max(1, torch.cuda.device_count())
    rows, remainder = divmod(stage.tokens_per_step, stage.max_length)
    micro_batch = max(1, min(stage.micro_batch, rows // ranks))
    accumulation, uneven = divmod(rows, micro_batch * ranks)
    if remainder or uneven or not accumulation:
        raise UserError(
            f"{name}: tokens_per_step {stage.tokens_per_step} is not a multiple of max_length {stage.max_length} x "
            f"micro_batch {micro_batch} x {ranks} ranks"
        )
    return ranks, micro_batch, accumulation


def answer_files(root: Path, names: list[str], split: str) -> list[str]:
    """Absolute paths of the existing answer files of the runs `names`. Raises UserError if there are none."""
    files = [answers_file(root, name, split).absolute() for name in names]
    existing = [str(file) for file in files if file.exists()]
    if not existing:
        raise UserError(f"{files[0]}: no such file; run the steps prompts and regenerate first")
    return existing


def training_files(root: Path, stage: StageSettings) -> list[str]:
    """Absolute paths of a stage's training data. Records to replay are spread evenly over their run's file."""
    files = answer_files(root, stage.answers, "train")
    for name, count in stage.replay.items():
        whole = answers_file(root, name, "train").absolute()
        part = whole.with_name(f"train-{count}.jsonl")
        if whole.exists():
            lines = whole.read_bytes().splitlines(keepends=True)
            kept = min(count, len(lines))
            write_atomically(part, b"".join(lines[number * len(lines) // kept] for number in range(kept)).decode())
            files.append(str(part))
    return files


def is_finished(folder: Path, steps: int) -> bool:
    """Whether step `steps` is done and its checkpoint is saved."""
    metrics = folder / METRICS
    done = read_jsonl(metrics)[-1:] if metrics.exists() else []
    return bool(done) and done[0]["step"] >= steps and (folder / CHECKPOINT).is_dir()


def launch_line(config: str, overrides: dict[str, Any], ranks: int) -> list[str]:
    """The DeepSpeed command that trains `config` with these overrides on `ranks` ranks, on a free port."""
    launcher = ["--num_gpus", str(ranks), "--master_port", str(free_port())]
    return trainer_line(config, [f"{key}={hydra_value(value)}" for key, value in overrides.items()], launcher)


def hydra_value(value: Any) -> str:
    """A value in the syntax of Hydra's overrides; strings are quoted."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return "[" + ",".join(map(hydra_value, value)) + "]"
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return str(value)


def launch(command: list[str], folder: Path, steps: int) -> float:
    """Run a launch command and return its duration in seconds.

    Its output is appended to FOLDER/log.txt, and a progress bar counts its steps. Raises UserError with the end of the
    log if it fails.
    """
    environment = {"OMP_NUM_THREADS": "4"} | os.environ
    if not torch.cuda.is_available():
        environment["DS_ACCELERATOR"] = "cpu"
    log, metrics = folder / "log.txt", folder / METRICS
    began = time.perf_counter()
    options = {"cwd": ROOT, "env": environment, "stderr": subprocess.STDOUT}
    bar = tqdm(total=steps, desc=str(folder.relative_to(folder.parents[1])), unit="step")
    with log.open("a") as output, running(command, stdout=output, **options) as child, bar:
        ended = False
        while not ended:
            ended = child.poll() is not None
            if metrics.exists() and (steps_done := metrics.read_bytes().count(b"\n")) > bar.n:
                bar.update(steps_done - bar.n)
            time.sleep(0.2)
    if child.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
        raise UserError(f"{folder}: training ended with code {child.returncode}; the last lines of {log}:\n{tail}")
    return time.perf_counter() - began


def table(settings: Settings, root: Path) -> pandas.DataFrame:
    """The trainer's evaluation after the last step: one row per finished stage of every arm and seed."""
    rows = []
    for arm, seed in all_runs(settings):
        for name, stage in arm_stages(settings, arm).items():
            folder = run_folder(root, arm, seed) / name
            steps = stage.overrides.get("max_steps", stage.steps)
            if not is_finished(folder, steps):
                continue
            last = read_jsonl(folder / METRICS)[-1]
            times = folder / "seconds.jsonl"
            seconds = sum(map(float, times.read_text().split())) if times.exists() else None
            row = {"arm": arm, "seed": seed, "stage": name, "steps": steps, "seconds": seconds}
            rows.append(row | {key: last.get(key) for key in SHOWN})
    return pandas.DataFrame(rows)


def write_table(settings: Settings, root: Path) -> None:
    """Write the table of arms as JSON and Markdown."""
    frame = table(settings, root)
    folder = root / "training"
    write_atomically(folder / f"{RECIPE_TABLE}.json", json.dumps(frame.to_dict("records"), indent=1) + "\n")
    write_atomically(folder / f"{RECIPE_TABLE}.md", markdown(summary(frame)) + "\n")


def summary(frame: pandas.DataFrame) -> pandas.DataFrame:
    """Mean over seeds per arm and stage, with the standard deviation of the acceptance length."""
    if frame.empty:
        return frame
    grouped = frame.groupby(["arm", "stage"], sort=False)
    means = grouped[["steps", "seconds", *SHOWN]].mean()
    means.insert(0, "seeds", grouped.size())
    means.insert(4, "sd over seeds", grouped["eval_acceptance_length"].std())
    return means.reset_index()
