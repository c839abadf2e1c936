"""Figures of a report: pooled ratios, standard errors, pairing by prompt, verdicts, tables."""

from functools import partial
from typing import Any

import numpy as np
import pandas
import pytest

from experiments.claims import Goal, goal_verdict, paper_claims
from longspec.pipeline.report import by_context, by_method, same_text
from longspec.pipeline.samples import Samples, pooled, speed_ratio


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


def test_speeds_are_compared_on_the_same_prompts() -> None:
    """Only one method decoded q1, so its slow sample must not count."""
    tree = frame(line(decode_s=0.5), line(number=1, decode_s=100.0))
    assert speed_ratio(tree, frame(line("vanilla"), line("vanilla", 2))).value == pytest.approx(2.0)
    assert speed_ratio(tree, frame(line("vanilla", 2))).samples == 0


def test_outputs_with_loops_are_counted_apart() -> None:
    samples = Samples(frame(line(), line(number=1, loops=True, rounds=1)))
    row = by_method(samples).iloc[0]
    assert (row["outputs"], row["with loops"], row["tokens per round"]) == (2, 1, "4.00")


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


def verdict(samples: Samples, figure: str, least: float, **values: Any) -> tuple[str, str]:
    row = goal_verdict(samples, Goal(figure, least, **values))
    return row.measured, row.verdict


def test_contexts_compare_on_the_same_text() -> None:
    """Outputs with loops and shorter prompts are left out; prompts are paired."""
    lines = [line(), line("vanilla")]
    for number, rounds in enumerate((8, 20)):
        for length, slower in ((1024, 1.0), (4096, 1.25), (None, 2.0)):
            sample = line("forced", number, context=30000, last_tokens=length, rounds=rounds * slower, bound=30.0)
            lines += [sample, sample | {"context": 4096, "rounds": 1}, sample | {"id": "l", "loops": True, "rounds": 1}]
    samples = Samples.of_lines(lines)
    assert samples.frame["method"].tolist() == ["tree", "vanilla"], "forced rounds are no samples of decoding"
    greedy, task, bound, _ = same_text(samples).to_dict("records")
    assert (greedy["task"], task["task"], greedy["T"], bound["T"]) == ("all", "gsm8k", "0", "1 (bound)")
    assert list(greedy)[2:] == ["1024 tokens", "4096 tokens", "30000 tokens", "4096 over 1024", "30000 over 1024"]
    assert greedy["1024 tokens"].startswith("2.86") and bound["1024 tokens"].startswith("2.14")
    assert (greedy["4096 over 1024"], greedy["30000 over 1024"]) == ("0.80 ± 0.00", "0.50 ± 0.00")
    assert verdict(samples, "longest over shortest context", 0.95) == ("0.50 ± 0.00", "missed")


def test_every_claim_of_the_paper_has_a_row() -> None:
    arms = {"short": 2.3, "block-attention": 2.0, "no-anchor-offset": 2.31}
    rows = {row.claim: row for row in paper_claims(evaluation(), arms)}
    noise = rows["Noisy training lengthens acceptance"]
    assert noise.verdict == "holds" and "2.00 to 2.30 tokens per round (+15.0%)" in noise.measured
    assert rows["Anchor-offset positions help"].verdict == "no difference", "-0.4% is within the spread of seeds"
    del arms["short"]
    unknown = {row.claim: row.verdict for row in paper_claims(evaluation(), arms)}
    assert unknown["Noisy training lengthens acceptance"] == "not measured"
    assert rows["Greedy output equals vanilla's"].measured == "8 of 8 outputs"
    assert rows["Tokens per round, lcc"].verdict == "not measured"
    assert len(paper_claims(evaluation(), {})) == len(rows)


def test_contexts_compare_over_the_tasks_that_have_all_of_them() -> None:
    edit = frame(line(task="edit", rounds=1))
    samples = Samples(pandas.concat([evaluation().frame, edit]))
    lengths = by_context(samples, samples.tokens_per_round)
    assert list(lengths.columns) == ["T", "task", "method", "1024 tokens", "7000 tokens", "all"]
    greedy = lengths[lengths["T"] == "0"]
    assert greedy["method"].tolist() == ["tree", "tree", "lookup", "tree"]
    assert greedy["task"].tolist() == ["gsm8k", "edit", "all", "all"]
    assert greedy["1024 tokens"].tolist() == ["5.00 ± 0.00", "40.00", "4.00 ± 0.00", "5.00 ± 0.00"]
    speeds = by_context(samples, partial(samples.speed_up, other="vanilla"))
    assert speeds["7000 tokens"].tolist() == ["5.00 ± 0.00", "-", "2.00 ± 0.00", "5.00 ± 0.00", "-", "-"]
