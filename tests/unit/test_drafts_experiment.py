"""The comparison of draft architectures on top of `longspec draft`."""

import json
from pathlib import Path
from typing import Any

import pandas
import pytest

from experiments.comparison import BASELINES, arm_folder, arm_settings, equal_steps, measure_arm, read_comparison
from experiments.drafts_page import acceptance_table, lookup_rounds, over_runs
from longspec.errors import UserError
from longspec.pipeline import training
from longspec.pipeline.evaluation import evaluation_folder
from longspec.pipeline.files import read_jsonl, write_atomically
from longspec.pipeline.settings import Settings, load_settings
from longspec.train.config import load_config

ROOT = Path(__file__).resolve().parents[2]


def load(name: str = "smollm2", *overrides: str) -> Settings:
    return load_settings(ROOT / "experiments" / f"drafts_{name}.yaml", overrides)


@pytest.mark.parametrize("name", ["smollm2", "qwen_coder"])
def test_every_arm_trains_the_draft_that_it_names(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer takes the configuration of each arm's first stage, on the same text and for the same steps."""
    settings = load(name)
    comparison = read_comparison(settings)
    (tmp_path / "text.jsonl").write_text('{"text": "x"}\n')
    monkeypatch.setattr(training, "answer_files", lambda *_: [])
    monkeypatch.setattr(training, "training_files", lambda *_: [str(tmp_path / "text.jsonl")])
    monkeypatch.setattr(training.TargetText, "load", lambda _: type("Text", (), {"path": "target"}))
    drafts = {}
    for arm in comparison.arms:
        stages: list[Any] = []
        monkeypatch.setattr(training, "train_stage", lambda *given: stages.append(given[1]))  # noqa: B023
        own = arm_settings(settings, comparison, arm, seed=3)
        training.train("stage1", own, tmp_path)
        values = {"model_name_or_path": "target", "data.files": str(tmp_path / "text.jsonl"), **stages[0].overrides}
        line = training.launch_line(stages[0].config, values, 1)
        start = line.index("-cp")
        config = load_config([*line[start : start + 4], *line[start + 4 :], f"output_dir={tmp_path}/out"])
        assert config is not None and stages[0].steps == settings.training.stages["stage1"].steps
        drafts[arm] = config.model.draft_options
    last, probed, eagle, window, equal = drafts.values()
    assert last.kv_layers == () and len(probed.kv_layers) == 1
    assert eagle.architecture == window.architecture == "eagle3" and equal == eagle and eagle.window > window.window


def test_an_arm_of_equal_time_has_fewer_steps(tmp_path: Path) -> None:
    """Its steps take the seconds of another arm, at the speeds of the lowest seed."""
    settings = load("smollm2", "training.stages.stage1.steps=90", "training.stages.stage2.steps=30")
    comparison = read_comparison(settings)
    with pytest.raises(UserError, match="arm eagle3 is not trained with seed 1; train it first"):
        equal_steps(settings, comparison, tmp_path, "eagle3-equal-time", 1)
    for seed, arm, seconds in ((0, "glide-last", 0.1), (0, "eagle3", 0.3), (1, "glide-last", 0.2), (1, "eagle3", 0.3)):
        for stage, steps in (("stage1", 90), ("stage2", 30)):
            folder = training.run_folder(arm_folder(tmp_path, arm, seed), seed) / stage
            (folder / training.CHECKPOINT).mkdir(parents=True)
            (folder / "metrics.jsonl").write_text(json.dumps({"step": steps, "seconds": seconds}) + "\n")
    steps = equal_steps(settings, comparison, tmp_path, "eagle3-equal-time", 1)
    assert steps == [30, 10] and equal_steps(settings, comparison, tmp_path, "eagle3", 1) == []
    stages = arm_settings(settings, comparison, "eagle3-equal-time", 1, steps).training.stages
    assert [stage.steps for stage in stages.values()] == steps and stages["stage1"].micro_batch == 8


def test_the_processes_on_gpus_measure_the_baselines_before_the_draft(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They read the settings in the arm's folder. An arm that is measured later only gets a copy."""
    settings, measured = load("smollm2"), []
    comparison = read_comparison(settings)

    def evaluate(_: Any, folder: Path) -> None:
        names = [method.name for method in load_settings(folder / "settings.yaml").evaluation.methods]
        measured.append(names)
        write_atomically(evaluation_folder(folder) / "samples-0.jsonl", json.dumps({"method": names[0]}) + "\n")

    monkeypatch.setattr("experiments.comparison.evaluate", evaluate)
    for arm in ("glide-last", "eagle3"):
        measure_arm(settings, comparison, tmp_path, arm, 0)
        copy = evaluation_folder(arm_folder(tmp_path, arm, 0)) / BASELINES
        assert [line["method"] for line in read_jsonl(copy)] == ["vanilla"]
    own = [method.name for method in comparison.methods]
    assert measured == [["vanilla", "lookup"], own, own]


def test_wrong_arms_are_named() -> None:
    for override, message in (
        ("experiment.arms={a: {like: b}}", "experiment.arms.a.like: name two other arms"),
        ("experiment.arms={a: {architecture: eagle4}}", "training.architecture: no architecture eagle4"),
        ("experiment.methods=[{name: forest, prompts: 1}]", "no method forest"),
    ):
        with pytest.raises(UserError, match=message):
            read_comparison(load("smollm2", override))


def test_prompt_lookup_on_a_given_text() -> None:
    """A text that repeats itself is proposed in whole chains; one without a repetition never."""
    assert lookup_rounds([5, 6, 7, 8] * 3, [5, 6, 7, 8] * 5, gamma=4) == (3, 15)
    assert lookup_rounds(list(range(9)), list(range(20, 32)), gamma=4) == (7, 7)


def test_errors_are_those_over_seeds() -> None:
    """With one run they are over prompts. Loops do not count."""
    rows = [
        {"task": "lcc", "context": 9, "id": str(n), "seed": 0, "run": run, "arm": "a", "shape": "tree", "bound": 1.0}
        | {"rounds": 10, "decoded_tokens": 20 + 10 * run, "loops": n == 2, "last_tokens": None}
        for run in (0, 1)
        for n in range(3)
    ]
    frame = pandas.DataFrame(rows)
    figure = over_runs(frame[~frame["loops"]], "decoded_tokens", "rounds")
    assert figure.value == 2.5 and figure.error == pytest.approx(0.5**0.5)
    (row,) = acceptance_table(frame).to_dict("records")
    assert row["9 tokens"] == str(figure)
    assert over_runs(frame[frame["run"] == 0], "decoded_tokens", "rounds").error == 0
