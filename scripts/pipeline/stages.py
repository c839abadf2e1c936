"""The three stages of the curriculum, by the trainer of every draft."""

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path

from longspec.train.config import load_config
from longspec.train.inputs import read_inputs
from scripts.pipeline.files import ANSWERS, LONG_TEXTS, TEXTS
from scripts.pipeline.machine import (
    CPU_RANKS,
    CommandFailed,
    bf16_is_faster,
    configuration_line,
    gpu_names,
    launch_line,
    run,
    threads_a_rank,
)

CHECKPOINT = "checkpoint-last"
DRAFT_WEIGHTS = "draft_model_weights.pth"
WAITING_TRAINER = "scripts.pipeline.waiting_trainer"


@dataclass(frozen=True)
class StageSettings:
    number: int
    family: str
    steps: int
    learning_rate: float
    max_length: int
    rows_a_step: int
    """On all ranks together."""
    accumulation: int = 1
    """Micro-batches that these come in."""
    variant: str = "sinkpi-slicing"
    overrides: Mapping[str, object] = field(default_factory=dict)
    """More of the launch line's key=value."""
    limit_s: float | None = None
    """After so many seconds the stage is told to stop, and what it has saved then is its result."""

    @property
    def experiment(self) -> str:
        return f"tiny_glide_stage{self.number}_sinkpi-slicing"

    @property
    def data(self) -> str:
        return (TEXTS, LONG_TEXTS, ANSWERS)[self.number - 1]


def train_stage(
    folder: Path,
    data: Path,
    target: Path,
    draft: Path | None,
    settings: StageSettings,
    cache: Path | None = None,
    turn: AbstractContextManager[object] | None = None,
) -> None:
    """One stage in `folder` on the JSONL file `data`, from the draft in `draft`, a file or folder (None: a fresh one).

    Tokens are cached in `cache`, else in `folder`. With a `turn`, a lock, it runs without a launcher on one GPU, loads
    what it needs there, and trains while it holds the lock; the limit counts from then. Raises CommandFailed.
    """
    devices, ranks = gpu_names(), 1 if turn else ranks_of(settings)
    environment = {"OMP_NUM_THREADS": str(threads_a_rank())} | ({} if devices else {"DS_ACCELERATOR": "cpu"})
    overrides = launch_overrides(folder, data, target, draft, settings, cache or folder / "cache", ranks)
    log = folder / "log.txt"
    if turn:
        command = [sys.executable, "-m", WAITING_TRAINER, *configuration_line(settings.experiment, overrides)]
    else:
        include = ["--include", "localhost:" + ",".join(devices[:ranks])] if devices else ["--num_gpus", str(ranks)]
        command = launch_line(include, settings.experiment, overrides)
    ended = run(command, log, environment, settings.limit_s, turn)
    if not draft_weights(folder).is_file():
        within = "" if ended else f" within {settings.limit_s} s"
        raise CommandFailed(f"no step was saved{within}; {log} says why")


def cache_rows(data: Path, target: Path, settings: StageSettings, cache: Path) -> None:
    """Tokenise a stage's data into `cache`, where every launch of the stage then finds it. Raises UserError."""
    overrides = launch_overrides(cache, data, target, None, settings, cache, ranks=1)
    config = load_config(configuration_line(settings.experiment, overrides))
    assert config is not None
    read_inputs(config)


def ranks_of(settings: StageSettings) -> int:
    return min(len(gpu_names()) or CPU_RANKS, settings.rows_a_step // settings.accumulation)


def launch_overrides(
    folder: Path, data: Path, target: Path, draft: Path | None, settings: StageSettings, cache: Path, ranks: int
) -> dict[str, object]:
    """What the trainer's line says besides the experiment's name."""
    family = settings.family
    return {
        "model._target_": f"longspec.train.models.{family}_glide.{family.title()}Glide.from_pretrained",
        "model.torch_dtype": "bfloat16" if bf16_is_faster() else "float32",
        "model_name_or_path": target.resolve(),
        "draft_model_name_or_path": draft.resolve() if draft else "null",
        "output_dir": folder.resolve(),
        "data.files": f"[{data.resolve()}]",
        "data.cache_dir": cache.resolve(),
        "data.max_length": settings.max_length,
        "data.overflow": "split",
        "data.chat_format": "tokenizer",
        "loss": "distill",
        "learning_rate": settings.learning_rate,
        "max_steps": settings.steps,
        "per_device_train_batch_size": settings.rows_a_step // settings.accumulation // ranks,
        "gradient_accumulation_steps": settings.accumulation,
        "variant": settings.variant,
        "variant.max_offset": 1024,
        "wandb.mode": "disabled",
    } | dict(settings.overrides)


def draft_weights(folder: Path) -> Path:
    """The draft that a stage left in its folder."""
    return folder / CHECKPOINT / DRAFT_WEIGHTS
