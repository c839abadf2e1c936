"""Where a run of the experiment keeps what."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Run:
    root: Path
    family: str
    preset: str

    @property
    def target(self) -> Path:
        return self.root / "target"

    def tasks(self, task: str, context: int) -> Path:
        return self.root / "tasks" / f"{task}-{context}.jsonl"

    def draft(self, variant: str, stage: int) -> Path:
        return self.root / variant / f"stage{stage}" / "checkpoint-last"
