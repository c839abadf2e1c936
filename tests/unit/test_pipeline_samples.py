"""Figures of a report: pooled ratios, errors, pairing by prompt, verdicts, and acceptance on given text."""

from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas
import pytest
import torch
from oracles import prefilled
from pairs import make_pair
from torch import Tensor

from experiments.claims import Goal, goal_verdict, paper_claims
from experiments.drafts_verdict import ROUNDS, ahead
from longspec import generate
from longspec.inference.drafting.proposal import Proposal
from longspec.inference.drafting.tree import TreeDrafter
from longspec.inference.engine_pool import release
from longspec.inference.options import WITHOUT_FILE
from longspec.inference.runner import Runner
from longspec.inference.sampling import GREEDY
from longspec.models.glide import GlideMixin
from longspec.pipeline import report
from longspec.pipeline.cells import Cell
from longspec.pipeline.evaluation import Decoder
from longspec.pipeline.forced import forced_acceptance, path_probabilities
from longspec.pipeline.report import by_context, by_method, same_text
from longspec.pipeline.run import verdict
from longspec.pipeline.samples import Samples, pooled, speed_ratio
from longspec.pipeline.settings import MethodSettings


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
    assert figure.value == pytest.approx(tokens.mean()) and figure.samples == 400
    assert figure.error == pytest.approx(tokens.std() / 20, rel=0.1)


def test_speeds_are_compared_on_the_same_prompts() -> None:
    """Only one method decoded q1, so its slow sample must not count."""
    tree = frame(line(decode_s=0.5), line(number=1, decode_s=100.0))
    assert speed_ratio(tree, frame(line("vanilla"), line("vanilla", 2))).value == pytest.approx(2.0)
    assert speed_ratio(tree, frame(line("vanilla", 2))).samples == 0


def test_a_draft_is_ahead_only_by_more_than_two_errors() -> None:
    """Errors are those over prompts, which the drafts share, and over seeds, here those of `near`."""
    runs = [("best", 0, 10), ("best", 1, 10), ("near", 0, 9.5), ("near", 1, 12.5), ("far", 0, 12)]
    lines = [line(number=n, arm=name, run=seed, rounds=n * rounds) for name, seed, rounds in runs for n in range(1, 5)]
    text = ahead(frame(*lines), "arm", *ROUNDS, digits=1)
    assert text.startswith("best 1.6 ±") and text.endswith("(within 2 errors: near)")
    assert ahead(frame(*lines[:4]), "arm", *ROUNDS, digits=1) == "-", "nothing to compare with"


def test_outputs_with_loops_are_counted_apart() -> None:
    row = by_method(Samples(frame(line(), line(number=1, loops=True, rounds=1)))).iloc[0]
    assert (row["outputs"], row["with loops"], row["tokens per round"]) == (2, 1, "4.00")


def evaluation() -> Samples:
    lines = []
    for number, (context, rounds) in product(range(4), ((1024, 8), (7000, 10))):
        prompt = {"context": context, "number": number}
        lines += [line(**prompt, rounds=rounds, decode_s=0.2), line(**prompt, temperature=1.0, rounds=20)]
        lines += [line("vanilla", **prompt, rounds=40), line("lookup", **prompt, decode_s=0.5)]
    return Samples(frame(*lines))


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
    goal = goal_verdict(samples, Goal("longest over shortest context", 0.95))
    assert (goal.measured, goal.verdict) == ("0.50 ± 0.00", "missed")


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
    assert rows["Tokens per round, lcc"].verdict == "not measured" and len(unknown) == len(rows)


def test_contexts_compare_over_the_tasks_that_have_all_of_them() -> None:
    edit = frame(line(task="edit", rounds=1))
    samples = Samples(pandas.concat([evaluation().frame, edit]))
    lengths = by_context(samples, samples.tokens_per_round)
    assert list(lengths.columns) == ["T", "task", "method", "1024 tokens", "7000 tokens", "all"]
    greedy = lengths[lengths["T"] == "0"]
    rows = list(zip(greedy["task"], greedy["method"], strict=True))
    assert rows == [("gsm8k", "tree"), ("edit", "tree"), ("all", "lookup"), ("all", "tree")]
    assert greedy["1024 tokens"].tolist() == ["5.00 ± 0.00", "40.00", "4.00 ± 0.00", "5.00 ± 0.00"]
    speeds = by_context(samples, partial(samples.speed_up, other="vanilla"))
    assert speeds["7000 tokens"].tolist() == ["5.00 ± 0.00", "-", "2.00 ± 0.00", "5.00 ± 0.00", "-", "-"]


SPEEDS = {"vanilla": 10, "lookup": 15, "tree": 20, "auto": 30}


def samples(outputs: dict[str, int], looping: dict[str, int]) -> Samples:
    """Greedy samples of every main method: numbers of outputs without and with loops by task."""
    rows = []
    for method, task in product(report.MAIN_METHODS, outputs):
        for number in range(outputs[task] + looping[task]):
            loops = number >= outputs[task]
            seconds = (0.1 if loops else 1.0) * 60 / SPEEDS[method]
            figures = {"rounds": 20, "decoded_tokens": 60, "decode_s": seconds, "loops": loops}
            rows.append(line(method, number, task=task, context=0, **figures))
    return Samples(frame(*rows))


def test_tasks_with_few_outputs_count_only_in_the_last_row() -> None:
    measured = samples({"lcc": report.LEAST_OUTPUTS, "edit": report.LEAST_OUTPUTS - 1}, {"lcc": 0, "edit": 3})
    assert report.main_tasks(measured) == ["lcc"]
    lcc, everything = report.main_table(measured).to_dict("records")
    assert (lcc["task"], everything["task"]) == ("lcc", "all")
    for row in (lcc, everything):
        assert row["tokens per round, tree"].startswith("3.00")
        assert row["tokens/s, auto"].startswith("30") and row["tokens/s, vanilla"].startswith("10")
        assert row["auto over vanilla"].startswith("3.00") and row["auto over lookup"].startswith("2.00")


def test_a_draft_slower_than_lookup_is_said_to_be(monkeypatch: pytest.MonkeyPatch) -> None:
    good = verdict(samples({"lcc": 6}, {"lcc": 0}))
    assert "3.00 ± 0.00 tokens per round" in good and "1.33 ± 0.00 x as fast as prompt lookup" in good
    monkeypatch.setitem(SPEEDS, "tree", 12)
    bad = verdict(samples({"lcc": 6}, {"lcc": 0}))
    assert bad.startswith("The draft is slower than prompt lookup") and "0.80 ± 0.00 x" in bad and "--text" in bad


SHAPE = (8, 8, 8)


def decoded(model: GlideMixin, prompt: Tensor, length: int) -> tuple[int, int]:
    """Number of rounds and tokens of greedy decoding while a whole tree fits before `length`."""
    drafter = TreeDrafter(Runner(model), 1, SHAPE, GREEDY, "descend")
    engine = prefilled(model, [prompt], drafter, new_tokens=60)
    read, counts = len(prompt), []
    while read + len(SHAPE) + 2 <= length:
        counts.append(int(engine.round(torch.ones(1, dtype=torch.bool))[1]))
        read += counts[-1]
    return len(counts), sum(counts)


@torch.no_grad()
def test_forced_rounds_on_greedy_text_are_those_of_decoding(tmp_path: Path) -> None:
    """Lookup proposes what followed before: on a text that repeats itself, each round accepts the whole chain."""
    model, prompts = make_pair(tmp_path), [torch.arange(3, 23), torch.arange(40, 9, -1)]
    texts = [generate(model, p[None], max_new_tokens=50, eos_token_id=()).sequences[0].tolist() for p in prompts]
    answers = [text[len(prompt) :] for prompt, text in zip(prompts, texts, strict=True)]
    forced = list(forced_acceptance(model, [prompt.tolist() for prompt in prompts], answers, SHAPE))
    for figures, prompt, text in zip(forced, prompts, texts, strict=True):
        assert (figures["rounds"], figures["decoded_tokens"]) == decoded(model, prompt, len(text))
        assert 1.05 * figures["rounds"] < figures["decoded_tokens"] and figures["bound"] > figures["rounds"]
    repeated = 2 * prompts[0].tolist()
    lookup = partial(forced_acceptance, model, shape=(1, 1, 1), drafter="lookup")
    short, long = lookup([[1, 2], repeated], [[2] * 9, repeated])
    assert long["decoded_tokens"] == 4 * long["rounds"] and not long["bound"]
    assert [short] == list(lookup([[1, 2]], [[2] * 9])), "a shorter prompt's padding shows nothing of its answer"


def test_prompts_of_a_context_are_decoded_as_by_generate_in_one_batch(tmp_path: Path) -> None:
    """Each size of batch costs a compilation."""
    decoder: Any = Decoder.__new__(Decoder)
    prompts: list[dict[str, Any]] = [{"id": str(n), "ids": [*range(5, 25)] * n} for n in (1, 12)]
    decoder.model, decoder.warmed_up = make_pair(tmp_path), set()
    decoder.text = SimpleNamespace(prompt_ids=lambda record: record["ids"])
    cell = Cell("chat", 0, MethodSettings("lookup", prompts=2), 1.0, 20, tuple(prompts))
    samples = list(decoder.samples(cell, prompts, None))
    assert release(decoder.model) == 1
    own: Any = {"method": "lookup", "temperature": 1.0, "max_new_tokens": 20, **WITHOUT_FILE}
    for sample, prompt in zip(samples, prompts, strict=True):
        tokens = generate(decoder.model, [prompt["ids"]], seed=cell.prompt_seed(prompt["id"]), **own).new_tokens[0]
        assert sample["token_ids"] == tokens.tolist()


def test_the_bound_sums_the_targets_probabilities_over_paths() -> None:
    """A root with children 5 and 7, a child 2 below 7, and a node without parent that only fills its level."""
    visible = [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 1, 0, 0], [1, 0, 1, 1, 0], [0, 0, 0, 0, 1]]
    tokens, parents = torch.tensor([[1, 5, 7, 2, 0]]), torch.tensor([[-1, 0, 0, 2, -1]])
    proposal = Proposal(tokens, parents, torch.tensor([0, 1, 1, 2, 2]), torch.tensor([visible]) > 0, depth=2)
    logits = torch.randn(1, 5, 8, generator=torch.Generator().manual_seed(0))
    p = logits.softmax(-1)[0]
    expected = torch.stack([torch.tensor(1.0), p[0, 5], p[0, 7], p[0, 7] * p[2, 2], torch.tensor(0.0)])
    torch.testing.assert_close(path_probabilities(proposal, logits)[0], expected)
