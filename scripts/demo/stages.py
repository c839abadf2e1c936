"""The three stages of the curriculum, through the launch line that trains every draft."""

from dataclasses import dataclass
from pathlib import Path

from scripts.demo.corpus import ANSWERS, LONG_TEXTS, TEXTS
from scripts.demo.machine import CPU_RANKS, bf16_is_faster, gpus, launch_line, run, threads_a_rank

CHECKPOINT = "checkpoint-last"
DRAFT_WEIGHTS = "draft_model_weights.pth"
METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class StageSettings:
    number: int
    family: str
    steps: int
    learning_rate: float
    max_length: int
    rows_a_step: int
    """On all ranks together."""

    @property
    def experiment(self) -> str:
        return f"tiny_glide_stage{self.number}_sinkpi-slicing"

    @property
    def data(self) -> str:
        return (TEXTS, LONG_TEXTS, ANSWERS)[self.number - 1]


def train_stage(folder: Path, corpus: Path, target: Path, draft: Path | None, settings: StageSettings) -> None:
    """One stage in `folder`, from the draft in `draft`, a file (None: a fresh one)."""
    ranks = min(gpus() or CPU_RANKS, settings.rows_a_step)
    include = ["--include", "localhost:" + ",".join(map(str, range(ranks)))] if gpus() else ["--num_gpus", str(ranks)]
    family = settings.family
    overrides = {
        "model._target_": f"longspec.train.models.{family}_glide.{family.title()}Glide.from_pretrained",
        "model.torch_dtype": "bfloat16" if bf16_is_faster() else "float32",
        "model_name_or_path": target.resolve(),
        "draft_model_name_or_path": draft.resolve() if draft else "null",
        "output_dir": folder.resolve(),
        "data.files": f"[{(corpus / settings.data).resolve()}]",
        "data.cache_dir": (folder / "cache").resolve(),
        "data.max_length": settings.max_length,
        "data.overflow": "split",
        "data.chat_format": "tokenizer",
        "loss": "distill",
        "learning_rate": settings.learning_rate,
        "max_steps": settings.steps,
        "per_device_train_batch_size": settings.rows_a_step // ranks,
        "gradient_accumulation_steps": 1,
        "variant.max_offset": 1024,
        "wandb.mode": "disabled",
    }
    environment = {"OMP_NUM_THREADS": str(threads_a_rank())} | ({} if gpus() else {"DS_ACCELERATOR": "cpu"})
    run(launch_line(include, settings.experiment, overrides), folder / "log.txt", environment)


def draft_weights(folder: Path) -> Path:
    """The draft that a stage left in its folder."""
    return folder / CHECKPOINT / DRAFT_WEIGHTS
