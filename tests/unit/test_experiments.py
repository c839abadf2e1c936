"""Ablation arms on top of `longspec draft`."""

from pathlib import Path

import pytest

from experiments.arms import read_experiment
from longspec.pipeline.settings import load_settings

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize("name", ["smollm2", "qwen_coder", "demo"])
def test_every_configuration_is_valid(name: str) -> None:
    settings = load_settings(ROOT / "experiments" / f"{name}.yaml")
    if settings.experiment:
        read_experiment(settings)
