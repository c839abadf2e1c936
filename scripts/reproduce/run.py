"""Where a run of the experiment keeps what."""

from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from scripts.pipeline.stages import CHECKPOINT

VARIANTS = ("sinkpi-slicing", "base")
"""The first one is evaluated, the second one in ablations."""
STAGES = (1, 2, 3)


@dataclass(frozen=True)
class Run:
    """One preset with one family of targets, below the folder `root`."""

    root: Path
    family: str
    preset: str
    target_place: str = "target"
    """The target's folder below `root`."""

    def tasks(self, task: str, context: int) -> Path:
        """Prompts of at most `context` tokens; no file where the texts had none."""
        return self.root / "tasks" / f"{task}-{context}.jsonl"

    @property
    def target(self) -> Path:
        """Weights and tokenizer in Hugging Face form."""
        return self.root / self.target_place

    def stage(self, place: str, stage: int) -> str:
        """The name of a stage's folder below `root`; place: a variant, or an ablation's arm."""
        return f"{place}/stage{stage}"

    def draft(self, place: str, stage: int) -> Path:
        """The newest checkpoint of a stage."""
        return self.root / self.stage(place, stage) / CHECKPOINT


class Trained(NamedTuple):
    """A draft's checkpoint, and the run whose target it has."""

    run: Run
    draft: Path
