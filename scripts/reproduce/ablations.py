"""Placeholder until the measuring half is there."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from scripts.reproduce.evaluate import EvaluationSettings
from scripts.reproduce.run import Run

UNTRAINED: dict[str, Callable[[Path, Run, EvaluationSettings], Any]] = {}


def arm_settings(settings: EvaluationSettings) -> EvaluationSettings:
    raise NotImplementedError


def evaluate_arms(folder: Path, run: Run, arms: Mapping[str, Path], settings: EvaluationSettings) -> dict[str, Any]:
    raise NotImplementedError
