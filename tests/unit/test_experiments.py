"""Ablation arms on top of `longspec draft`."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import arms
from experiments.arms import arm_figures, arm_folder, arm_settings, arm_table, read_experiment, train_arm
from longspec.errors import UserError
from longspec.pipeline.settings import Settings, load_settings

ROOT = Path(__file__).resolve().parents[2]


def load(*overrides: str) -> Settings:
    return load_settings(ROOT / "experiments" / "smollm2.yaml", overrides)


@pytest.mark.parametrize("name", ["smollm2", "qwen_coder", "demo"])
def test_every_configuration_is_valid(name: str) -> None:
    settings = load_settings(ROOT / "experiments" / f"{name}.yaml")
    if settings.experiment:
        read_experiment(settings)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("experiment.goals=[{figure: speed, least: 1}]", r"goals\[0\]: no speed; use tokens per round"),
        ("experiment.goals=[{figure: tokens/s, least: 1, each: [id]}]", r"goals\[0\]: no id; use task, context"),
        ("experiment.goals=[{figure: tokens/s, least: 1, tasks: [lbc]}]", r"goals\[0\]: no lbc; use lcc"),
        ("experiment.amrs={}", "amrs"),
        ("experiment.arms.ce={stepz: 7}", "arms.ce: .*stepz"),
    ],
)
def test_a_mistake_is_one_line_with_its_key(override: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        read_experiment(load(override))
    assert "\n" not in str(error.value)


def test_an_arm_changes_stage_1_and_shares_the_text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load("experiment.arms={short: {steps: 7}, ce: {steps: 7, overrides: {loss: ce}}}")
    experiment = read_experiment(settings)
    recipe, arm = settings.training.stages["stage1"], arm_settings(settings, experiment, "ce")
    (stage,) = arm.training.stages.values()
    assert stage.overrides == recipe.overrides | {"loss": "ce"} and (stage.steps, stage.answers) == (7, recipe.answers)
    assert [method.name for method in arm.evaluation.methods] == ["vanilla", "forced"] and not arm.probes

    calls: list[Any] = []
    monkeypatch.setattr(arms, "train", lambda name, settings, folder: calls.append((name, folder)))
    monkeypatch.setattr(arms, "evaluate", lambda settings, folder: calls.append(folder))
    (tmp_path / "answers" / "chat").mkdir(parents=True)
    for _ in range(2):
        train_arm(settings, experiment, tmp_path, "ce")
    folder = arm_folder(tmp_path, "ce")
    assert calls == [("stage1", folder), folder] * 2 and (folder / "answers" / "chat").is_dir()
    with pytest.raises(UserError, match="--arms nothing: no such arm; use short, published-layer"):
        train_arm(settings, experiment, tmp_path, "nothing")

    # Only teacher-forced rounds count, and arms without any are left out.
    samples = [{"rounds": 10, "decoded_tokens": 25, "bound": 3.0}, {"rounds": 30, "decoded_tokens": 80, "bound": 9.0}]
    (folder / "evaluation").mkdir()
    lines = [*samples, {"rounds": 50, "decoded_tokens": 50}]
    (folder / "evaluation" / "samples-0.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert arm_figures(experiment, tmp_path) == {"ce": 105 / 40}
    assert arm_table(settings, experiment, tmp_path).empty
