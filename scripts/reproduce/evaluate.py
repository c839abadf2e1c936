"""Placeholder until the measuring half is there."""

from dataclasses import dataclass
from pathlib import Path

from scripts.reproduce.run import Run


@dataclass(frozen=True)
class EvaluationSettings:
    limit_s: float = 360.0
    contexts: tuple[int, ...] = (2048, 4096, 8192, 16384)
    new_tokens: int = 192


def evaluate(folder: Path, run: Run, settings: EvaluationSettings) -> None:
    raise NotImplementedError
