"""The experiment's evaluation: what a cell holds, that a stopped one goes on, and that it keeps its time."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import CONTEXTS, SHAPE, small_run, small_settings

from longspec import generate
from scripts.reproduce import evaluate as module
from scripts.reproduce.baselines import BASELINES, Transformers
from scripts.reproduce.cells import CELLS, Cell, Clock, Measurement, read_cells
from scripts.reproduce.evaluate import FACTS, FORCED, NO_TIME, ROUNDS, Decoders, cells_of, evaluate, read_prompts
from scripts.reproduce.pair import load_pair
from scripts.reproduce.summary import sameness, samples_of

PLAN = (
    Measurement("vanilla", prompts=2),
    Measurement("tree", prompts=2, tree_shape=SHAPE),
    Measurement("tree-descend", "tree", 1.0, 1, seeds=2, tree_shape=SHAPE, tree_rule="descend"),
    Measurement("magicdec", prompts=1, tasks=("gsm8k",), longest_contexts=1),
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("longspec.inference.tree_shapes.TOKENS", 4)


def key_of(line: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(line[name] for name in ("name", "temperature", "task", "context", "seed"))


def test_cells_hold_what_generate_says(tmp_path: Path) -> None:
    """Every planned cell has its prompts; tokens, counts and seeds are those of `generate` on the task's prompt."""
    run, settings = small_run(tmp_path), small_settings(*PLAN)
    evaluate(tmp_path / "evaluation", run, settings)
    lines = read_cells(tmp_path / "evaluation" / CELLS)
    assert len(lines) == 4 + 4 + 8 + 1
    assert all(len(line["samples"]) == line["planned"] for line in lines)
    assert (lines[-1]["name"], lines[-1]["task"], lines[-1]["context"]) == ("magicdec", "gsm8k", CONTEXTS[-1])
    facts = json.loads((tmp_path / "evaluation" / FACTS).read_text())
    assert facts["absent"] == [f"qmsum-{context}" for context in CONTEXTS] and facts["left_out"] == []
    samples = samples_of(lines)
    vanilla = [sample for sample in samples if sample["name"] == "vanilla"]
    tree = [sample for sample in samples if sample["name"] == "tree"]
    same = sameness(tree, vanilla)
    assert same == {"outputs": 8, "different": 0, "per_1000_tokens": 0.0, "earliest_difference": None}
    pair = load_pair(run.target, run.draft("sinkpi-slicing", 3))
    prompt = pair.prompts(run.tasks("gsm8k", 64), "gsm8k", 64, 2)[1]
    text = pair.tokenizer.decode(prompt.token_ids[0])
    assert text.endswith("Question: 1?\nAnswer:")
    (sample,) = [s for s in tree if (s["task"], s["context"], s["id"]) == ("gsm8k", 64, "r1")]
    out = generate(pair.model, prompt.token_ids, tree_shape=SHAPE, max_new_tokens=9)
    assert sample["token_ids"] == out.new_tokens[0].tolist()
    assert (sample["rounds"], sample["accepted_by_depth"]) == (out.stats.rounds, out.stats.accepted_by_depth)
    assert (sample["tree_shape"], sample["prompt_tokens"]) == (list(SHAPE), prompt.token_ids.shape[1])
    assert sample["decoded_tokens"] == 8 and sample["tokens_per_second"] == 8 / sample["decode_s"]
    drawn = {tuple(s["token_ids"]) for s in samples if (s["temperature"], s["id"], s["task"]) == (1.0, "r0", "lcc")}
    assert len(drawn) == 4, "two seeds at two contexts"


def test_forced_acceptance_and_rounds_are_measured(tmp_path: Path) -> None:
    run, settings = small_run(tmp_path), small_settings(*PLAN[2:3])
    evaluate(tmp_path / "evaluation", run, settings)
    forced = json.loads((tmp_path / "evaluation" / FORCED).read_text())
    for context in map(str, CONTEXTS):
        assert forced["held_out"][context]["rounds"] > 0
        assert forced["held_out"][context]["acceptance_length"] >= 1
        sampled = forced["sampled"][context]
        assert 1 <= sampled["expected_length"] <= 6 and len(sampled["probability_by_depth"]) == 5
    rounds = json.loads((tmp_path / "evaluation" / ROUNDS).read_text())
    assert [row["context"] for row in rounds["attention"]] == list(CONTEXTS)
    assert all(row["dense_ms"] > 0 for row in rounds["attention"])


@pytest.mark.gpu
def test_on_a_gpu_all_methods_and_the_parts_of_a_round_are_measured(tmp_path: Path) -> None:
    run, settings = small_run(tmp_path), small_settings(*(replace(m, prompts=1) for m in module.PLAN))
    evaluate(tmp_path / "evaluation", run, settings)
    facts = json.loads((tmp_path / "evaluation" / FACTS).read_text())
    assert facts["dtype"] == "bfloat16" and not [row for row in facts["left_out"] if row["reason"] != NO_TIME]
    rounds = json.loads((tmp_path / "evaluation" / ROUNDS).read_text())
    assert [row["context"] for row in rounds["parts"]] == list(CONTEXTS)
    assert all(row["hybrid_ms"] > 0 and row["backend"] != "sdpa" for row in rounds["attention"])


def test_a_killed_evaluation_goes_on_and_measures_no_cell_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, settings = small_run(tmp_path), small_settings(*PLAN)
    folder, sample, calls = tmp_path / "evaluation", Decoders.sample, 0

    def dies(self: Decoders, cell: Cell, *args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > 9:
            raise KeyboardInterrupt
        return sample(self, cell, *args, **kwargs)

    monkeypatch.setattr(Decoders, "sample", dies)
    with pytest.raises(KeyboardInterrupt):
        evaluate(folder, run, settings)
    kept = read_cells(folder / CELLS)
    assert kept
    with (folder / CELLS).open("a") as handle:  # the line that was being written
        handle.write('{"name": "tree", "temp')
    seen: list[tuple[Any, ...]] = []

    def watched(self: Decoders, cell: Cell, *args: Any, warm_up: bool = False, **kwargs: Any) -> Any:
        if not warm_up:
            seen.append(cell.key)
        return sample(self, cell, *args, warm_up=warm_up, **kwargs)

    monkeypatch.setattr(Decoders, "sample", watched)
    evaluate(folder, run, settings)
    lines = read_cells(folder / CELLS)
    assert lines[: len(kept)] == kept and len(lines) == 17
    assert not set(seen) & {key_of(line) for line in kept}
    seen.clear()
    evaluate(folder, run, settings)
    assert not seen and len(read_cells(folder / CELLS)) == 17


def test_another_draft_or_other_settings_are_measured_anew(tmp_path: Path) -> None:
    run, settings, folder = small_run(tmp_path), small_settings(PLAN[1]), tmp_path / "evaluation"
    evaluate(folder, run, settings)
    kept = (folder / CELLS).read_text()
    evaluate(folder, run, replace(settings, limit_s=200.0))
    assert (folder / CELLS).read_text() == kept
    path = run.draft("sinkpi-slicing", 3) / "draft_model_weights.pth"
    torch.save({name: 2 * weight for name, weight in torch.load(path).items()}, path)
    evaluate(folder, run, settings)
    again = (folder / CELLS).read_text()
    assert again != kept
    evaluate(folder, run, replace(settings, new_tokens=5))
    assert {sample["new_tokens"] for sample in samples_of(read_cells(folder / CELLS))} == {5}


def test_it_keeps_its_time_and_says_what_it_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sample takes 10 s of a clock that only samples move: 100 s are dealt out by shares, first cells first."""
    now = 0.0
    sample = Decoders.sample

    def slow(self: Decoders, *args: Any, **kwargs: Any) -> Any:
        nonlocal now
        now += 10.0
        return sample(self, *args, **kwargs)

    monkeypatch.setattr(Decoders, "sample", slow)
    monkeypatch.setattr("scripts.reproduce.cells.time.monotonic", lambda: now)
    settings = replace(small_settings(*PLAN), forced_share=0.5)
    evaluate(tmp_path / "evaluation", small_run(tmp_path), settings)
    assert 60 <= now <= 130
    lines = read_cells(tmp_path / "evaluation" / CELLS)
    facts = json.loads((tmp_path / "evaluation" / FACTS).read_text())
    missing = sum(row.get("prompts", 0) for row in facts["left_out"])
    assert {row["reason"] for row in facts["left_out"]} == {NO_TIME}
    assert sum(len(line["samples"]) for line in lines) + missing == 8 + 8 + 8 + 1
    assert {line["name"] for line in lines} >= {"vanilla", "tree"}


def test_warm_ups_come_before_every_methods_first_sample_at_a_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, int, bool]] = []
    sample = Decoders.sample

    def watched(self: Decoders, cell: Cell, *args: Any, warm_up: bool = False, **kwargs: Any) -> Any:
        calls.append((cell.measurement.name, cell.context, warm_up))
        return sample(self, cell, *args, warm_up=warm_up, **kwargs)

    monkeypatch.setattr(Decoders, "sample", watched)
    evaluate(tmp_path / "evaluation", small_run(tmp_path), small_settings(*PLAN))
    for place in {call[:2] for call in calls}:
        mine = [warm_up for *at, warm_up in calls if tuple(at) == place]
        assert mine[0] and not any(mine[1:])


def test_time_left_over_goes_to_the_parts_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 5.0
    monkeypatch.setattr("scripts.reproduce.cells.time.monotonic", lambda: now)
    clock = Clock(100.0, [1.0, 3.0])
    clock.next_part()
    assert clock.left() == 25 and clock.share_of(1) == 25 and clock.share_of(10) == 5
    now += 10
    clock.next_part()
    assert clock.left() == 90 and clock.passed() == 10


def test_transformers_modes_decode_the_same_tokens_and_are_timed_without_prefill(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    plan = [Measurement(name, prompts=2, tasks=("gsm8k",), longest_contexts=1, new_tokens=7) for name in BASELINES]
    evaluate(tmp_path / "evaluation", run, small_settings(Measurement("vanilla", prompts=2), *plan))
    lines = read_cells(tmp_path / "evaluation" / CELLS)
    assert [line["name"] for line in lines[4:]] == list(BASELINES)
    samples = samples_of(lines)
    vanilla = [sample for sample in samples if sample["name"] == "vanilla"]
    for name in BASELINES:
        mine = [sample for sample in samples if sample["name"] == name]
        same = sameness(mine, vanilla)
        assert same is not None and (same["outputs"], same["different"]) == (2, 0)
        for one in mine:
            assert one["new_tokens"] == 7 and 1 <= one["decoded_tokens"] <= 6
            assert one["decode_s"] > 0 and one["ttft_s"] > 0
        assert all(one["decoded_tokens"] == 6 for one in mine) or name in BASELINES[1:3]


def test_a_baseline_that_fails_is_told_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: Transformers, *args: Any) -> Any:
        raise RuntimeError("no compiler here\nand a long trace")

    monkeypatch.setattr(Transformers, "_sample", broken)
    baseline = Measurement(BASELINES[3], prompts=1, tasks=("lcc",), longest_contexts=1)
    evaluate(tmp_path / "evaluation", small_run(tmp_path), small_settings(baseline))
    (line,) = read_cells(tmp_path / "evaluation" / CELLS)
    assert (line["samples"], line["failed"]) == ([], "RuntimeError: no compiler here")
    facts = json.loads((tmp_path / "evaluation" / FACTS).read_text())
    assert [row["reason"] for row in facts["left_out"]] == ["RuntimeError: no compiler here"]


def test_a_baseline_that_hangs_is_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def hangs(self: Transformers, *args: Any) -> Any:
        while True:
            pass

    monkeypatch.setattr(Transformers, "_sample", hangs)
    monkeypatch.setattr("scripts.reproduce.baselines.CALL_LIMIT_S", 0.2)
    baseline = Measurement(BASELINES[3], prompts=1, tasks=("lcc",), longest_contexts=1)
    evaluate(tmp_path / "evaluation", small_run(tmp_path), small_settings(baseline))
    (line,) = read_cells(tmp_path / "evaluation" / CELLS)
    assert line["failed"] == "TimeoutError: took longer than 0.2 s"


def test_the_shown_plan_names_methods_that_exist(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    settings = small_settings(*module.PLAN)
    pair = load_pair(run.target, run.draft("sinkpi-slicing", 3))
    decoders = Decoders(pair, run.target, settings)
    prompts = read_prompts(pair, run, settings)
    with torch.no_grad():
        for measurement in (*module.PLAN, *module.CPU_PLAN):
            cell, mine = next(cells_of(measurement, prompts))
            assert decoders.sample(cell, mine[0], seed=0, warm_up=True)["new_tokens"] in (9, 16)
