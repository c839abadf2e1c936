"""The experiment's evaluation: what a cell holds, that a stopped one goes on, and that it keeps its time."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from small_run import CONTEXTS, SHAPE, small_run, small_settings

from longspec import generate
from longspec.kernels.decoding.sdpa_attention import SdpaAttention
from scripts.reproduce import evaluate as module
from scripts.reproduce import plan
from scripts.reproduce.baselines import BASELINES, LOOKUP_TOKENS, Transformers
from scripts.reproduce.cells import CELLS, Budget, Cell, Measurement, key_of, read_cells
from scripts.reproduce.evaluate import FACTS, FORCED, NO_TIME, ROUNDS, Decoders, cells_of, evaluate, read_prompts
from scripts.reproduce.pair import Prompt, load_pair
from scripts.reproduce.report import report
from scripts.reproduce.rounds import dense_attention, dense_mask, random_layers
from scripts.reproduce.summary import sameness, samples_of

pytestmark = pytest.mark.slow

PLAN = (
    Measurement("vanilla", prompts=2),
    Measurement("tree", prompts=2, tree_shape=SHAPE),
    Measurement("tree-descend", "tree", 1.0, 1, seeds=2, tree_shape=SHAPE, tree_rule="descend"),
    Measurement("magicdec", prompts=1, tasks=("gsm8k",), longest_contexts=1),
)


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("longspec.inference.adaptive.measurement.REPLAYS", 1)


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


def test_the_dense_mask_is_the_same_attention(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    pair = load_pair(run.target, run.draft("sinkpi-slicing", 3))
    q, layers = random_layers(pair, context=21, nodes=6)
    tree = torch.rand(1, 6, 6).lt(0.5) | torch.eye(6, dtype=torch.bool)
    keys, values = layers[0]
    mask = dense_mask(tree, 21, layers.shape[4], q.shape[1] // keys.shape[1], q.dtype)
    hybrid = SdpaAttention().hybrid(torch.tensor([21]), tree)(q, keys, values, q.shape[3] ** -0.5)
    torch.testing.assert_close(dense_attention(q, keys, values, mask), hybrid)


@pytest.mark.gpu
def test_on_a_gpu_all_methods_and_the_parts_of_a_round_are_measured(tmp_path: Path) -> None:
    run, settings = small_run(tmp_path), small_settings(*(replace(m, prompts=1) for m in plan.PLAN))
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


class SlowSamples:
    """A clock that only sampling moves, and loading a pair."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, sample_s: float, warm_up_s: float, load_s: float) -> None:
        self.now = 0.0
        sample, load = Decoders.sample, load_pair

        def slow(decoders: Decoders, *args: Any, warm_up: bool = False, **kwargs: Any) -> Any:
            self.now += warm_up_s if warm_up else sample_s
            return sample(decoders, *args, warm_up=warm_up, **kwargs)

        def slow_load(*args: Any) -> Any:
            self.now += load_s
            return load(*args)

        monkeypatch.setattr(Decoders, "sample", slow)
        monkeypatch.setattr(module, "load_pair", slow_load)
        monkeypatch.setattr("scripts.reproduce.cells.time.monotonic", lambda: self.now)


def counts(folder: Path) -> tuple[list[int], int]:
    """Samples of each cell that has a line, and how many more were planned in all."""
    facts = json.loads((folder / FACTS).read_text())
    assert {row["reason"] for row in facts["left_out"]} <= {NO_TIME}
    samples = [len(line["samples"]) for line in read_cells(folder / CELLS)]
    return samples, sum(row.get("prompts", 0) for row in facts["left_out"])


@pytest.mark.parametrize(("forced_s", "least", "most"), [(0.0, 60, 130), (60.0, 20, 60)])
def test_it_keeps_its_time_and_says_what_it_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forced_s: float, least: int, most: int
) -> None:
    """Of 100 s those that teacher forcing does not need are dealt out by shares, whatever loading took."""
    clock = SlowSamples(monkeypatch, sample_s=10.0, warm_up_s=2.0, load_s=500.0)
    settings = replace(small_settings(*PLAN), forced_s=forced_s)
    evaluate(tmp_path / "evaluation", small_run(tmp_path), settings)
    assert least <= clock.now - 500 <= most
    samples, missing = counts(tmp_path / "evaluation")
    assert sum(samples) + missing == 8 + 8 + 8 + 1 and missing
    assert {line["name"] for line in read_cells(tmp_path / "evaluation" / CELLS)} >= {"vanilla", "tree"}


def test_what_is_compiled_before_a_part_is_no_loss_of_that_part(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its share is 20 of 80 s, and each of its two warm-ups takes 25: all of its cells are measured nevertheless."""
    SlowSamples(monkeypatch, sample_s=1.0, warm_up_s=25.0, load_s=0.0)
    settings = replace(small_settings(replace(PLAN[0], share=1.0), replace(PLAN[1], share=2.0)), limit_s=80.0)
    evaluate(tmp_path / "evaluation", small_run(tmp_path), settings)
    vanilla = [line for line in read_cells(tmp_path / "evaluation" / CELLS) if line["name"] == "vanilla"]
    assert [len(line["samples"]) for line in vanilla] == [2] * 4


def test_no_two_prompts_are_sampled_with_the_same_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of other cells are then independent, as the bootstrap over samples takes them to be."""
    sample, drawn = Decoders.sample, []

    def noted(decoders: Decoders, cell: Cell, prompt: Prompt, seed: int, warm_up: bool = False) -> Any:
        drawn.extend([] if warm_up else [seed])
        return sample(decoders, cell, prompt, seed, warm_up)

    monkeypatch.setattr(Decoders, "sample", noted)
    plan = Measurement("tree", temperature=1.0, prompts=2, seeds=2, tree_shape=SHAPE)
    evaluate(tmp_path / "evaluation", small_run(tmp_path), small_settings(plan))
    assert len(set(drawn)) == len(drawn) == 2 * len(CONTEXTS) * 2 * 2, "two tasks, two prompts, two seeds"


def test_what_the_time_cut_short_is_measured_by_the_next_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each sample once, those of a cell in several calls with the seeds that they would have had in one."""
    clock = SlowSamples(monkeypatch, sample_s=10.0, warm_up_s=0.0, load_s=0.0)
    run, settings = small_run(tmp_path), replace(small_settings(*PLAN), forced_s=0.0)
    whole, folder = tmp_path / "whole", tmp_path / "evaluation"
    evaluate(whole, run, replace(settings, limit_s=1e6))
    began, left, calls = clock.now, 1, 0
    while left and calls < 9:
        evaluate(folder, run, settings)
        left, calls = counts(folder)[1], calls + 1
    assert calls > 2 and clock.now - began == 250, "25 samples of 10 s"
    assert json.loads((folder / FACTS).read_text())["seconds"] == 250
    (one, several) = ({key_of(line): line for line in read_cells(place / CELLS)} for place in (whole, folder))
    assert one.keys() == several.keys()
    for key, line in one.items():
        assert [s["token_ids"] for s in line["samples"]] == [s["token_ids"] for s in several[key]["samples"]]
    assert (folder / FORCED).read_text() == (whole / FORCED).read_text()


def test_what_sigterm_interrupts_can_be_reported_and_gone_on_with(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, settings, sample, calls = small_run(tmp_path), small_settings(*PLAN), Decoders.sample, []

    def interrupted(decoders: Decoders, *args: Any, **kwargs: Any) -> Any:
        calls.append(args)
        if len(calls) == 5:
            raise SystemExit(143)
        return sample(decoders, *args, **kwargs)

    monkeypatch.setattr(Decoders, "sample", interrupted)
    folder = run.root / "evaluation"
    with pytest.raises(SystemExit):
        evaluate(folder, run, settings)
    assert counts(folder)[1] > 0
    report(tmp_path / "report", run)
    assert "want of time" in (tmp_path / "report" / "README.md").read_text()
    evaluate(folder, run, settings)
    assert counts(folder)[1] == 0


def test_other_prompts_are_measured_anew(tmp_path: Path) -> None:
    run, settings, folder = small_run(tmp_path), small_settings(PLAN[1]), tmp_path / "evaluation"
    evaluate(folder, run, settings)
    before = samples_of(read_cells(folder / CELLS))
    path = run.tasks("lcc", CONTEXTS[0])
    path.write_text(path.read_text().replace("x0", "y0"))
    evaluate(folder, run, settings)
    after = samples_of(read_cells(folder / CELLS))
    assert len(before) == len(after) and before[0]["decode_s"] != after[0]["decode_s"]


def test_a_tree_shape_is_chosen_on_a_prompt_that_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    warmed, measured, sample = set(), set(), Decoders.sample

    def watched(self: Decoders, cell: Cell, prompt: Prompt, *args: Any, warm_up: bool = False, **kwargs: Any) -> Any:
        (warmed if warm_up else measured).add((prompt.task, prompt.context, prompt.id))
        return sample(self, cell, prompt, *args, warm_up=warm_up, **kwargs)

    monkeypatch.setattr(Decoders, "sample", watched)
    evaluate(tmp_path / "evaluation", small_run(tmp_path), small_settings(PLAN[1]))
    assert warmed and measured and not warmed & measured


def test_prompt_lookup_proposes_as_many_tokens_as_that_of_transformers(tmp_path: Path) -> None:
    evaluate(tmp_path / "evaluation", small_run(tmp_path), small_settings(Measurement("lookup", prompts=1)))
    samples = samples_of(read_cells(tmp_path / "evaluation" / CELLS))
    assert {len(sample["accepted_by_depth"]) for sample in samples} == {LOOKUP_TOKENS}


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
    budget = Budget(100.0, [1.0, 2.0, 1.0])
    budget.next_part()
    assert budget.left() == 25 and budget.share_of(1) == 25 and budget.share_of(10) == 5
    now += 10
    budget.next_part()
    assert budget.left() == 60 and budget.passed() == 10
    with budget.uncharged():
        now += 9
    assert budget.left() == 60
    now += 61
    budget.next_part()
    assert budget.left() == 20, "what was not charged to the second part, and what it took too much"


def test_transformers_modes_decode_the_same_tokens_and_are_timed_without_prefill(tmp_path: Path) -> None:
    run = small_run(tmp_path)
    modes = [Measurement(name, prompts=2, tasks=("gsm8k",), longest_contexts=1) for name in BASELINES]
    settings = replace(small_settings(Measurement("vanilla", prompts=2), *modes), new_tokens=7)
    evaluate(tmp_path / "evaluation", run, settings)
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
    settings = small_settings(*plan.PLAN)
    pair = load_pair(run.target, run.draft("sinkpi-slicing", 3))
    decoders = Decoders(pair, run.target, settings)
    prompts = read_prompts(pair, run, settings)
    with torch.no_grad():
        for measurement in (*plan.PLAN, *plan.CPU_PLAN):
            cell, mine = next(cells_of(measurement, prompts))
            assert decoders.sample(cell, mine[0], seed=0, warm_up=True)["new_tokens"] in (9, 16)
