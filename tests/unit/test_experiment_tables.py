"""Figures of the experiment's report: pooled ratios, standard errors, pairing by prompt, verdicts, tables."""

import math
from pathlib import Path

import numpy as np
import pandas
import pytest

from experiments.cells import SampleFile
from experiments.claims import Samples, paper_claims, targets
from experiments.evaluation import evaluation_folder
from experiments.report import by_method, by_seed, by_task_and_context, output_counts, untimed
from experiments.settings import load_settings
from experiments.tables import markdown, pooled, speed_ratio, tokens_per_round, tokens_per_second

PRESET = Path(__file__).resolve().parents[2] / "experiments" / "smollm2.yaml"


def line(method: str = "tree", number: int = 0, **changes: object) -> dict:
    values = {"task": "gsm8k", "context": 1024, "method": method, "temperature": 0.0, "seed": 0, "id": f"q{number}"}
    values |= {"decoded_tokens": 40, "rounds": 10, "decode_s": 1.0, "loops": False, "token_ids": [1, 2, number]}
    return values | changes


def frame(*lines: dict) -> pandas.DataFrame:
    return pandas.DataFrame(lines)


def test_a_pooled_ratio_has_the_error_of_its_prompts() -> None:
    """With equal denominators, the ratio is a mean, whose standard error is known."""
    tokens = np.random.default_rng(1).normal(4.0, 1.0, size=400)
    figure = pooled([tokens, np.ones(400)], [str(number) for number in range(400)])
    assert figure.value == pytest.approx(tokens.mean())
    assert figure.error == pytest.approx(tokens.std() / 20, rel=0.1)
    assert figure.samples == 400


def test_samples_of_one_prompt_are_resampled_together() -> None:
    """Ten copies of each sample leave the standard error unchanged."""
    tokens = np.random.default_rng(1).normal(4.0, 1.0, size=100)
    once = pooled([tokens, np.ones(100)], [str(number) for number in range(100)])
    often = pooled([np.repeat(tokens, 10), np.ones(1000)], [str(number) for number in np.repeat(np.arange(100), 10)])
    assert often.error == pytest.approx(once.error, rel=1e-6)


def test_one_prompt_has_no_error_and_none_has_no_value() -> None:
    one = pooled([[3.0], [2.0]], ["a"])
    assert one.value == 1.5 and math.isnan(one.error) and str(one) == "1.50"
    none = pooled([[], []], [])
    assert none.samples == 0 and str(none) == "-"


def test_speeds_are_compared_on_the_same_prompts() -> None:
    """Only one method decoded q1, so its slow sample must not count."""
    tree = frame(line(decode_s=0.5), line(number=1, decode_s=100.0))
    assert speed_ratio(tree, frame(line("vanilla"), line("vanilla", 2))).value == pytest.approx(2.0)
    assert speed_ratio(tree, frame(line("vanilla", 2))).samples == 0


def test_samples_without_a_time_count_for_acceptance_only() -> None:
    tree, vanilla = frame(line(decode_s=0.5), line(number=1, decode_s=None)), frame(line("vanilla"), line("vanilla", 1))
    assert tokens_per_second(tree).value == 80.0 and speed_ratio(tree, vanilla).samples == 1
    assert tokens_per_round(tree).samples == 2
    assert untimed(Samples(tree)) == []
    assert untimed(Samples(frame(line(decode_s=None)))) == ["gsm8k (1024 tokens)"]


def test_outputs_with_loops_are_counted_apart() -> None:
    samples = Samples(frame(line(), line(number=1, loops=True, rounds=1)))
    assert tokens_per_round(samples.of("tree")).value == 4.0
    counts = output_counts(samples).iloc[0]
    assert (counts["outputs"], counts["with loops"], counts["without loops"]) == (2, 1, 1)
    assert counts["tokens per round with loops"] == "40.00"


def evaluation() -> Samples:
    lines = []
    for number in range(4):
        for context, rounds in ((1024, 8), (7000, 10)):
            prompt = {"context": context, "number": number}
            lines.append(line(**prompt, rounds=rounds, decode_s=0.2))
            lines.append(line(**prompt, temperature=1.0, rounds=20))
            lines.append(line("vanilla", **prompt, rounds=40))
            lines.append(line("lookup", **prompt, decode_s=0.5))
    return Samples(frame(*lines))


def test_targets_are_reached_missed_or_not_measured() -> None:
    verdicts = {row.claim: row.verdict for row in targets(evaluation())}
    assert verdicts["Tokens per round, gsm8k, T = 0"] == "missed"  # 4.4 < 5
    assert verdicts["Tokens per round, chat, T = 0"] == "not measured"
    assert verdicts["Tokens per round at 7000 over 1024 tokens"] == "missed"  # 0.8
    assert verdicts["Tokens/s, tree over vanilla, all tasks"] == "reached"  # 5
    assert verdicts["Tokens/s, tree over lookup, gsm8k"] == "reached"  # 2.5


def test_a_cpu_has_its_own_speed_target() -> None:
    """It concerns wall-clock time, prefill included."""
    pair = {"new_tokens": 64}
    frames = [line(**pair, wall_s=2.0, decode_s=0.1), line("vanilla", **pair, wall_s=4.0, decode_s=0.1)]
    rows = [row for row in targets(Samples(frame(*frames)), on_cpu=True) if "Tokens/s" in row.claim]
    assert [(row.expected, row.measured, row.verdict) for row in rows] == [("at least 1.3", "2.00", "reached")]


def test_every_claim_of_the_paper_has_a_row() -> None:
    diagnostics = {
        "recipe-0 stage1": {"chat": {"rounds": 10.0, "tokens": 2.0}, "code": {"rounds": 30.0, "tokens": 2.4}},
        "recipe-0 stage2": {"chat": {"rounds": 10.0, "tokens": 9.0}},
        "block-attention-0 stage1": {"chat": {"rounds": 20.0, "tokens": 2.0}},
    }
    rows = {row.claim: row for row in paper_claims(evaluation(), diagnostics)}
    assert rows["Noisy training lengthens acceptance"].verdict == "holds"
    assert "2.00 to 2.30 tokens per round (+15.0%)" in rows["Noisy training lengthens acceptance"].measured
    assert rows["Anchor-offset positions help"].verdict == "not measured"
    short = {"short-0 stage1": {"chat": {"rounds": 20.0, "tokens": 2.5}}}
    changed = {row.claim: row for row in paper_claims(evaluation(), diagnostics | short)}
    assert "2.00 to 2.50 tokens" in changed["Noisy training lengthens acceptance"].measured, "an arm changes short"
    noise = {"no-anchor-offset-0 stage1": {"chat": {"rounds": 20.0, "tokens": 2.51}}}
    close = {row.claim: row for row in paper_claims(evaluation(), diagnostics | short | noise)}
    assert close["Anchor-offset positions help"].verdict == "no difference", "-0.4% is within the spread of seeds"
    assert rows["Greedy output equals vanilla's"].measured == "8 of 8 outputs"
    assert rows["Tokens per round, lcc"].verdict == "not measured"
    assert len(paper_claims(evaluation(), {})) == len(rows)


def test_seeds_are_shown_with_their_spread(tmp_path: Path) -> None:
    settings = load_settings(PRESET, ["training.seeds=[0,1,2]"])
    assert by_seed(settings, tmp_path, evaluation()).empty, "one seed has no spread"
    for seed, rounds in ((1, 10), (2, 5)):
        SampleFile(evaluation_folder(tmp_path, seed)).append(line(rounds=rounds, prompt=0))
    rows = by_seed(settings, tmp_path, Samples(frame(line(rounds=8)))).set_index("seed")
    assert rows["gsm8k"].tolist() == pytest.approx([5.0, 4.0, 8.0, 17 / 3, np.std([5, 4, 8], ddof=1)])
    assert rows.index.tolist() == ["0", "1", "2", "mean", "sd"]


def test_tables_have_a_row_per_method_and_task() -> None:
    samples = evaluation()
    lengths = by_task_and_context(samples)
    assert list(lengths.columns) == ["task", "T", "1024 tokens", "7000 tokens", "all"]
    assert lengths["1024 tokens"].tolist() == ["5.00 ± 0.00", "2.00 ± 0.00"]
    methods = by_method(samples)
    tree = methods[(methods["method"] == "tree") & (methods["T"] == 0.0) & (methods["task"] == "all")].iloc[0]
    assert (tree["tokens/s"], tree["over vanilla"], tree["over lookup"]) == ("200 ± 0", "5.00 ± 0.00", "2.50 ± 0.00")
    table = markdown(pandas.DataFrame([{"a": 1.5, "b": None}, {"a": 0.12345, "b": "x"}]))
    assert table.splitlines() == ["| a | b |", "| --- | --- |", "| 1.5 | - |", "| 0.123 | x |"]
