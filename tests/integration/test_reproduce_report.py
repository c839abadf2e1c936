"""The page of a run: every figure on it comes from the run's folders, and what is missing is said."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from small_run import CONTEXTS, SHAPE, small_run, small_settings

from scripts.reproduce.ablations import PLAN, UNTRAINED, arm_settings, evaluate_arms
from scripts.reproduce.baselines import BASELINES
from scripts.reproduce.cells import CELLS, Measurement
from scripts.reproduce.evaluate import evaluate
from scripts.reproduce.pair import load_pair
from scripts.reproduce.plan import EvaluationSettings
from scripts.reproduce.report import PAGE, SUMMARY, main, report
from scripts.reproduce.run import Run, Trained

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("longspec.inference.adaptive.measurement.REPLAYS", 1)


@pytest.fixture
def evaluated(tmp_path: Path) -> Run:
    run = small_run(tmp_path / "run")
    plan = [
        Measurement("vanilla", prompts=2),
        Measurement("tree", prompts=2, tree_shape=SHAPE),
        Measurement("tree", temperature=1.0, prompts=1, seeds=2, tree_shape=SHAPE),
        Measurement(BASELINES[0], prompts=1, tasks=("lcc",), longest_contexts=1),
    ]
    evaluate(run.root / "evaluation", run, small_settings(*plan))
    return run


def test_the_page_holds_the_measured_figures_and_its_pictures(evaluated: Run, tmp_path: Path) -> None:
    parts = {"draft attention": 0.1, "verify rest": 0.4}
    row = {"shape": "llama", "context": 2048, "batch": 1, "method": "tree", "floor_ms": 0.3, "parts": parts}
    rounds = json.loads((evaluated.root / "evaluation" / "rounds.json").read_text())
    (evaluated.root / "evaluation" / "rounds.json").write_text(json.dumps(rounds | {"parts": [row]}))
    folder = tmp_path / "docs"
    report(folder, evaluated)
    summary = json.loads((folder / SUMMARY).read_text())
    page = (folder / PAGE).read_text()
    (tree,) = [row for row in summary["methods"] if (row["name"], row["temperature"]) == ("tree", 0.0)]
    assert f"| tree | 0 | 8 | {tree['all']['acceptance_length']['value']:.2f} ±" in page
    assert f"| {BASELINES[0]} | 0 | 1 | – |" in page
    for row in summary["marks"] + summary["claims"]:
        assert f"| {row['claim']} | {row['wanted']} | {row['measured']} |" in page
    assert "(seeds " in page
    assert "to a held-out loss of 2.00 nats a token" in page
    assert "No prompts for qmsum-64, qmsum-128." in page
    pictures = {path.stem for path in folder.glob("*.png")}
    assert pictures == {
        *("acceptance_by_context", "acceptance_by_depth", "attention", "loss_draft"),
        *("loss_target", "round", "speed"),
    }
    assert all(f"]({name}.png)" in page for name in pictures)
    assert str(tmp_path) not in page + (folder / SUMMARY).read_text(), "no path of a machine"


def test_the_command_publishes_a_run_under_its_name(
    evaluated: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "reproduce-small" / "llama"
    root.parent.mkdir()
    evaluated.root.rename(root)
    monkeypatch.setattr("sys.argv", ["report", str(root), "--results", str(tmp_path / "results")])
    main()
    assert "(small)" in (tmp_path / "results" / "small-llama" / PAGE).read_text()
    monkeypatch.setattr("sys.argv", ["report", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert "give the folder of a run that has been evaluated" in capsys.readouterr().err


def test_a_report_of_few_cells_says_what_failed_and_what_was_late(evaluated: Run, tmp_path: Path) -> None:
    """With vanilla's cells alone there is still a page, in which nothing is claimed."""
    place = evaluated.root / "evaluation"
    lines = [json.loads(line) for line in (place / CELLS).read_text().splitlines()]
    failed: dict[str, Any] = lines[-1] | {"samples": [], "failed": "RuntimeError: no compiler"}
    kept = [line for line in lines if line["name"] == "vanilla"] + [failed]
    (place / CELLS).write_text("".join(json.dumps(line) + "\n" for line in kept))
    facts = json.loads((place / "facts.json").read_text())
    late = {"name": "tree", "reason": "no time left", "prompts": 2}
    (place / "facts.json").write_text(json.dumps(facts | {"left_out": [late]}))
    (place / "forced.json").unlink()
    (place / "rounds.json").unlink()
    report(tmp_path / "docs", evaluated)
    page = (tmp_path / "docs" / PAGE).read_text()
    assert f"- {BASELINES[0]} at 128 tokens failed: RuntimeError: no compiler" in page
    assert "for want of time: 1 cells of tree" in page
    summary = json.loads((tmp_path / "docs" / SUMMARY).read_text())
    assert all(row["holds"] is None for row in summary["marks"] + summary["claims"])


def ablation_settings() -> EvaluationSettings:
    plan = tuple(replace(measurement, prompts=1) for measurement in PLAN)
    return replace(arm_settings(small_settings()), tasks=("lcc",), contexts=CONTEXTS[:1], plan=plan)


def test_arms_are_evaluated_with_their_own_drafts_and_targets_and_reported(
    evaluated: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = replace(evaluated, target_place="other/target")
    shutil.copytree(evaluated.target, other.target)
    (other.target / "training.json").write_text(json.dumps([{"held_out_loss": 3.0}, {"loss": 1.0}]))
    loaded: list[Path] = []

    def load(target: Path, draft: Path) -> Any:
        loaded.append(target)
        return load_pair(target, draft)

    monkeypatch.setattr("scripts.reproduce.evaluate.load_pair", load)
    folder = evaluated.root / "ablations" / "anchor_offset"
    arms = {"on": Trained(evaluated, evaluated.draft("sinkpi-slicing", 3))}
    arms["off"] = Trained(other, evaluated.draft("sinkpi-slicing", 1))
    found = evaluate_arms(folder, arms, ablation_settings())
    assert json.loads((folder / "results.json").read_text()).keys() == found.keys()
    assert found["sooner"] == pytest.approx(3.0), "the third stage's held-out loss falls three times as fast"
    assert [len(result["losses"]) for result in found["arms"].values()] == [5, 5]
    assert [result["target_loss"] for result in found["arms"].values()] == [2.0, 3.0]
    assert loaded == [evaluated.target, other.target]
    names = {(row["name"], row["temperature"]) for row in found["arms"]["on"]["methods"]}
    assert names == {("vanilla", 0.0), ("tree", 0.0), ("tree", 1.0)}
    assert {path.name for path in folder.glob("*.png")} == {"ablation.png", "losses.png", "held_out_losses.png"}
    again = evaluate_arms(evaluated.root / "ablations" / "window", {"512": arms["on"]}, ablation_settings())
    assert again["arms"]["512"] == found["arms"]["on"], "a draft that several ablations share is measured once"
    report(tmp_path / "docs", evaluated)
    steps = found["arms"]["off"]["losses"][-1][0]
    assert f"| anchor_offset | off | 3.00 | {steps} | 0 | " in (tmp_path / "docs" / PAGE).read_text()
    told = json.loads((tmp_path / "docs" / SUMMARY).read_text())["ablations"]["anchor_offset"]
    pooled = [{name: row[name] for name in ("name", "temperature", "all")} for row in found["arms"]["on"]["methods"]]
    assert told["sooner"] == found["sooner"] and told["arms"]["on"]["methods"] == json.loads(json.dumps(pooled))


@pytest.mark.parametrize("name", UNTRAINED)
def test_ablations_without_training(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scripts.reproduce.ablations.SHAPES", ((1, 1), SHAPE))
    run = small_run(tmp_path / "run")
    folder = run.root / "ablations" / name
    found = UNTRAINED[name](folder, run, ablation_settings())
    assert json.loads((folder / "results.json").read_text())["name"] == name
    assert (folder / "ablation.png").stat().st_size > 5000
    if name == "dense_mask":
        assert [row["context"] for row in found["attention"]] == [CONTEXTS[0]]
    else:
        arms = {"curriculum": ["stage 1", "stage 2", "stage 3"], "tree_shapes": ["tree 1 1", "tree 2 3"]}
        assert list(found["arms"]) == arms[name]
