"""The experiment's figures are pooled over passes, split by loops and compared on the same prompts."""

from pathlib import Path
from typing import Any

import pytest

from scripts.pipeline.files import write_jsonl
from scripts.reproduce.ablations import MOST_POINTS, losses_of, sooner
from scripts.reproduce.claims import Evidence, Verdict, claims, marks
from scripts.reproduce.report import method_row
from scripts.reproduce.summary import (
    acceptance,
    by_depth,
    loops,
    paired,
    pooled,
    sameness,
    samples_of,
    speed,
    speed_up,
    summarise,
)


def sample(tokens: int, rounds: int | None, seconds: float = 1.0, **more: Any) -> dict[str, Any]:
    depths = [] if rounds is None else [tokens - rounds]
    return {
        "name": "tree",
        "temperature": 0.0,
        "seed": 0,
        "task": "lcc",
        "context": 2048,
        "id": "a",
        "decoded_tokens": tokens,
        "rounds": rounds,
        "decode_s": seconds,
        "ttft_s": 0.1,
        "distinct_4grams": 0.9,
        "stopped_at_eos": False,
        "tree_shape": [],
        "accepted_by_depth": depths,
        "token_ids": [1, 2, 3],
    } | more


def test_figures_are_pooled_over_passes_and_seconds() -> None:
    """One long sample weighs more than a short one: 30 tokens in 10 passes and 2 in 2 are 32 / 12, not the mean 2."""
    samples = [sample(30, 10, 3.0), sample(2, 2, 1.0, id="b")]
    assert acceptance(samples) == 32 / 12
    assert speed(samples) == 32 / 4
    assert by_depth(samples) == [20 / 12]
    found = pooled(samples, acceptance)
    assert found is not None and found["value"] == 32 / 12 and found["error"] > 0 and found["seeds"] is None
    assert acceptance([]) is None and pooled([], acceptance) is None and by_depth([]) == []
    assert acceptance([sample(30, None)]) is None, "transformers does not tell its passes"


def test_seeds_give_the_range_of_their_own_figures() -> None:
    samples = [sample(30, 10, seed=0), sample(40, 10, seed=1), sample(20, 10, seed=2)]
    found = pooled(samples, acceptance)
    assert found is not None and found["seeds"] == [2.0, 4.0] and found["value"] == 3.0


def test_outputs_that_loop_are_told_apart() -> None:
    straight, looping = sample(20, 10), sample(60, 10, id="b", distinct_4grams=0.2)
    assert [loops(one) for one in (straight, looping, sample(1, 1, distinct_4grams=None))] == [False, True, False]
    (row,) = summarise([cell(straight, looping)])
    figures = row["all"]
    assert figures["acceptance_length"]["value"] == 4
    assert figures["acceptance_length_without_loops"]["value"] == 2
    assert figures["acceptance_length_of_loops"]["value"] == 6
    assert (figures["samples"], figures["loops"], figures["acceptance_by_depth"]) == (2, 1, [1.0])
    assert method_row(row)[8:10] == ["40.0", "20.0"], "tokens/s of all, and of outputs that do not loop"
    (alone,) = row["cells"]
    assert (alone["acceptance"]["value"], alone["acceptance_without_loops"]["value"]) == (4, 2)
    (row,) = summarise([cell(looping)])
    assert row["all"]["acceptance_by_depth"] == [], "nothing is told of outputs that do not loop"


def cell(*samples: dict[str, Any], **more: Any) -> dict[str, Any]:
    """A line of cells.jsonl."""
    fields = ("name", "temperature", "seed", "task", "context")
    return {field: samples[0][field] for field in fields} | {"samples": list(samples)} | more


def test_ratios_are_taken_on_prompts_that_both_have() -> None:
    mine = [sample(40, 10, 1.0), sample(10, 10, 1.0, id="b")]
    theirs = [sample(20, 20, 2.0, name="vanilla"), sample(99, 99, 1.0, name="vanilla", id="c")]
    assert speed_up(mine, theirs) == {"value": 4.0, "error": None, "samples": 1, "seeds": None}
    assert [len(found) for found in paired(mine, theirs)] == [1, 1]
    assert speed_up(mine[1:], theirs) is None


def test_a_ratio_spreads_as_its_prompts_do() -> None:
    """Both sides of a prompt are drawn together: where one is slow on both, the ratio is certain."""
    theirs = [sample(10, 10, seconds, name="vanilla", id=name) for name, seconds in (("a", 1.0), ("b", 5.0))]
    even = [sample(10, 10, seconds / 2, id=name) for name, seconds in (("a", 1.0), ("b", 5.0))]
    uneven = [sample(10, 10, 0.5, id=name) for name in "ab"]
    certain, spread = speed_up(even, theirs), speed_up(uneven, theirs)
    assert certain is not None and spread is not None
    assert (certain["value"], certain["samples"]) == (2.0, 2)
    assert certain["error"] == pytest.approx(0, abs=1e-12) and spread["error"] > 1


def test_first_differences_are_counted_up_to_where_they_are() -> None:
    vanilla = [sample(3, 3, id=name, token_ids=[1, 2, 3, 4]) for name in "abc"]
    mine = [sample(3, 3, id=name, token_ids=tokens) for name, tokens in (("a", [1, 2, 9, 9]), ("b", [1, 2, 3]))]
    mine.append(sample(1, 1, id="x"))
    assert sameness(mine, vanilla) == {
        "outputs": 2,
        "different": 1,
        "per_1000_tokens": 1000 / (3 + 3),
        "earliest_difference": 2,
    }
    assert sameness(mine[2:], vanilla) is None


def evidence(*samples: dict[str, Any], **more: Any) -> Evidence:
    parts: Any = {"facts": {"dtype": "bfloat16"}, "forced": {}, "rounds": {}, "ablations": {}} | more
    return Evidence(list(samples), **parts)


def verdict(rows: list[Verdict], start: str) -> Verdict:
    (row,) = [row for row in rows if row.claim.startswith(start)]
    return row


@pytest.mark.parametrize(("tokens", "reached"), [(41, True), (39, False)])
def test_marks_look_at_outputs_that_do_not_loop(tokens: int, reached: bool) -> None:
    found = evidence(sample(tokens, 10), sample(900, 10, id="b", distinct_4grams=0.1))
    row = verdict(marks(found), "Acceptance length of tree, code")
    assert row.holds is reached and row.measured.startswith(f"{tokens / 10:.2f}")


def test_what_was_not_measured_is_neither_held_nor_refuted() -> None:
    rows = [*claims(evidence()), *marks(evidence())]
    assert rows and all(row.holds is None and row.measured.startswith("–") for row in rows)


def test_speed_is_judged_at_the_two_longest_contexts_against_the_best_baseline() -> None:
    def at(context: int, name: str, seconds: float, **more: Any) -> dict[str, Any]:
        return sample(100, None if name.startswith("tr-") else 25, seconds, context=context, name=name, **more)

    samples = [at(context, "tree", 1.0) for context in (2048, 8192, 16384)]
    samples += [at(2048, "vanilla", 1.0), *(at(context, "vanilla", 2.0) for context in (8192, 16384))]
    samples += [at(context, "lookup", 1.2) for context in (8192, 16384)]
    samples += [at(16384, f"transformers-{mode}", seconds) for mode, seconds in (("dynamic", 20.0), ("static", 6.0))]
    rows = marks(evidence(*samples))
    vanilla = verdict(rows, "Tokens/s of tree over vanilla")
    mine = "4.00 tokens in 40.00 ms"
    told = f"2.00 ± 0.00 × ({mine}; vanilla 4.00 tokens in 80.00 ms; 2 outputs)"
    assert (vanilla.measured, vanilla.holds) == (told, True)
    lookup = verdict(rows, "Tokens/s of tree over lookup, T = 0, code")
    told = f"1.20 ± 0.00 × ({mine}; lookup 4.00 tokens in 48.00 ms; 2 outputs)"
    assert (lookup.measured, lookup.holds) == (told, False)
    assert verdict(rows, "Tokens/s of tree over lookup, T = 0, others").holds is None
    assert verdict(rows, "Tokens/s of tree over lookup, T = 1, code").holds is None
    warm = [at(16384, name, seconds, temperature=1.0) for name, seconds in (("tree", 1.0), ("lookup", 1.5))]
    at_1 = verdict(marks(evidence(*samples, *warm)), "Tokens/s of tree over lookup, T = 1, code")
    told = f"1.50 × ({mine}; lookup 4.00 tokens in 60.00 ms; 1 outputs)"
    assert (at_1.measured, at_1.holds) == (told, True)
    best = verdict(rows, "Tokens/s of tree over transformers'")
    assert (best.measured, best.holds) == ("6.00 × (transformers-static at 16384)", True)
    one = verdict(marks(evidence(*samples[:-1])), "Tokens/s of tree over transformers'")
    assert (one.measured, one.holds) == ("–", None), "the compiled one may be the faster"
    slow = at(8192, "transformers-dynamic", 4.0)
    least = verdict(marks(evidence(*samples, slow)), "Tokens/s of tree over transformers'")
    assert (least.measured, least.holds) == ("4.00 × (transformers-dynamic at 8192)", False)


def test_loops_of_the_best_baseline_leave_it_to_compare_with() -> None:
    """Its speed does not depend on the text: with loops left out of the tree's outputs, others of the cell remain."""
    looping = sample(100, 10, 1.0, distinct_4grams=0.1)
    baselines = [
        sample(100, None, 20.0, name=f"transformers-{mode}", distinct_4grams=0.1) for mode in ("dynamic", "static")
    ]
    rows = marks(evidence(looping, sample(100, 40, 4.0, id="b"), *baselines))
    best = verdict(rows, "Tokens/s of tree over transformers'")
    assert (best.measured, best.holds) == ("5.00 × (transformers-dynamic at 2048)", True)
    elsewhere = sample(100, 40, 4.0, task="qmsum")
    assert verdict(marks(evidence(looping, elsewhere, *baselines)), "Tokens/s of tree over transformers'").holds is None


@pytest.mark.parametrize(("long", "holds"), [(39, True), (37, False)])
def test_acceptance_over_length_compares_the_same_tasks(long: int, holds: bool) -> None:
    samples = [sample(40, 10), sample(90, 10, task="qmsum"), sample(long, 10, context=16384)]
    assert verdict(claims(evidence(*samples)), "Acceptance hardly falls").holds is holds


@pytest.mark.parametrize(("seconds", "holds"), [(1.04, True), (1.06, False)])
def test_time_of_a_round_is_compared_on_the_same_prompts(seconds: float, holds: bool) -> None:
    warm = sample(20, 10, seconds, temperature=1.0)
    found = evidence(sample(40, 10, 1.0), sample(40, 10, 99.0, id="b"), warm)
    rows = [row for row in marks(found) if row.claim == "Time of a round at T = 1 against T = 0, tree"]
    assert rows[0].holds is holds


def test_descend_stands_beside_what_bounds_it() -> None:
    forced = {"sampled": {"64": {"rounds": 10, "probability_by_depth": [6.0, 3.0]}, "128": None}}
    drawn = [sample(tokens, 10, temperature=1.0, name="tree-descend", id=str(tokens)) for tokens in (18, 19, 20)]
    row = verdict(marks(evidence(*drawn, forced=forced)), "Acceptance length at T = 1, rule descend")
    assert row.wanted == "1 + Σ p = 1.90; Σ p(children of the root) = 0.60"
    assert row.measured.startswith("1.90") and row.holds is True


def test_claims_of_ablations_read_their_results() -> None:
    def arm(length: float) -> dict[str, Any]:
        return {"methods": summarise([cell(*(sample(int(10 * length), 10, id=name) for name in "ab"))])}

    ablations = {"anchor_offset": {"sooner": 3.0}, "slicing": {"arms": {"slicing": arm(3.3), "block": arm(3.0)}}}
    attention = [{"context": 64, "dense_ms": 9.0, "hybrid_ms": 3.0, "backend": "triton"}]
    rows = claims(evidence(ablations=ablations, rounds={"attention": attention}))
    assert verdict(rows, "Anchor-offset").measured == "3.00 × sooner"
    assert verdict(rows, "Flash noisy").measured.startswith("+10.0%")
    assert verdict(rows, "Hybrid").measured == "9.00 → 3.00 ms (3.0 ×) at 64, on triton"
    assert all(verdict(rows, start).holds for start in ("Anchor-offset", "Flash noisy", "Hybrid"))


def test_a_spread_that_one_sample_does_not_tell_is_not_taken_for_none() -> None:
    alone = [sample(30, 10, 1.0, context=context) for context in (64, 128)]
    rows = claims(evidence(*alone))
    assert verdict(rows, "Acceptance hardly falls").measured.endswith("(100%)")
    more = [sample(30, 10, 1.0, context=context, id="more") for context in (64, 128)]
    rows = claims(evidence(*alone, *more))
    assert verdict(rows, "Acceptance hardly falls").measured.endswith("(100% ± 0%)")


def test_as_fast_is_not_faster() -> None:
    peers = [sample(30, 10, 1.0, name=name) for name in ("tree", "magicdec")]
    warm = [sample(30, 10, 1.0, name=name, temperature=1.0) for name in ("tree", "vanilla")]
    rows = claims(evidence(*peers, *warm))
    assert [verdict(rows, claim).holds for claim in ("Faster than magicdec", "Works at")] == [False, False]


@pytest.mark.parametrize(("slicing", "holds"), [((29, 31), None), ((39, 41), True), ((19, 21), False), ((60,), None)])
def test_noisy_training_is_decided_beyond_two_standard_errors(slicing: tuple[int, int], holds: bool | None) -> None:
    def arm(*tokens: int) -> dict[str, Any]:
        return {"methods": summarise([cell(*(sample(count, 10, id=str(count)) for count in tokens))])}

    found = evidence(ablations={"slicing": {"arms": {"slicing": arm(*slicing), "block": arm(29, 30)}}})
    assert verdict(claims(found), "Flash noisy").holds is holds


@pytest.mark.parametrize(
    ("dtype", "tokens", "holds"),
    [("float32", [1, 9], False), ("bfloat16", [1, 9], None), ("bfloat16", [1, 2, 3], True)],
)
def test_lossless_is_decided_by_tokens_in_fp32_alone(dtype: str, tokens: list[int], holds: bool | None) -> None:
    found = evidence(sample(3, 3, token_ids=tokens), sample(3, 3, name="vanilla"), facts={"dtype": dtype})
    assert verdict(claims(found), "Lossless").holds is holds


def test_sooner_is_where_one_held_out_curve_comes_to_the_end_of_the_other() -> None:
    slow = [(step, 4.0 - 0.02 * step) for step in range(10, 101, 10)]
    fast = [(step, 4.0 - 0.06 * step) for step in range(10, 101, 10)]
    assert sooner(fast, slow) == pytest.approx(3.0)  # between two evaluations
    assert sooner([(10, 1.0), (20, 0.5)], slow) == 10.0  # at the first one already
    assert sooner(slow, fast) is None
    assert sooner([], slow) is None and sooner(fast, []) is None


@pytest.mark.parametrize("steps", [3, MOST_POINTS, 2 * MOST_POINTS + 1])
def test_a_curve_has_so_many_points_that_it_can_be_drawn(tmp_path: Path, steps: int) -> None:
    """Means over spans of equal length, but the last; its last step is the training's."""
    metrics = tmp_path / "metrics.jsonl"
    lines: list[dict[str, float]] = [{"step": step, "loss": float(step)} for step in range(1, steps + 1)]
    lines[1]["eval_loss"] = 0.5
    write_jsonl(metrics, lines)
    curve = losses_of(metrics)
    assert len(curve) <= MOST_POINTS and curve[-1][0] == steps
    assert curve[0] == ((1, 1.0) if steps <= MOST_POINTS else (3, 2.0))
    assert losses_of(metrics, "eval_loss") == [(2, 0.5)]
    assert losses_of(metrics, "none") == losses_of(tmp_path / "none") == []


def test_samples_carry_their_cells_names() -> None:
    assert samples_of([cell(sample(1, 1), failed="x")])[0]["task"] == "lcc"
