"""Logits by options and by faults: every method gives the target's own answers, or the row and position of a fault."""

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from pairs import make_pair, target_greedy
from penalty_reference import greedy
from torch import Tensor, nn
from transformers import GenerationMixin

from longspec import generate
from longspec.errors import UserError
from longspec.inference import methods
from longspec.inference.answering import Listener, answer_all
from longspec.inference.arguments import checked_drafting
from longspec.inference.engine.requests import Request
from longspec.inference.methods import Drafting
from longspec.inference.request import Sampling
from longspec.inference.row_settings import PenaltyRows
from longspec.inference.token_options import token_settings
from longspec.models.glide import GlideMixin

VOCAB, NEW_TOKENS = 13, 16
PROMPTS = ([1, 2, 3, 4, 5, 1, 2, 3], [6, 7, 6, 7, 6], [9, 9, 1])
OPTIONS: tuple[tuple[dict[str, Any], list[int]], ...] = (
    ({"repetition_penalty": 1.7}, []),
    ({"no_repeat_ngram_size": 2}, []),
    ({"bad_words_ids": [[3], [5, 6], [1, 2, 7], [9, 9], [4, 4]]}, []),
    ({"repetition_penalty": 1.3, "no_repeat_ngram_size": 4, "suppress_tokens": [1, 2]}, []),
    ({"min_new_tokens": 7}, [2, 8, 4, 3, 7]),
    ({"min_length": 11}, [2, 8, 4, 3, 7]),
    ({"sequence_bias": [[[3], -2.0], [[1, 2, 7], 5.0], [[9, 9], -20.0]], "begin_suppress_tokens": [4, 9]}, []),
    ({"presence_penalty": 1.5, "frequency_penalty": 0.6, "logit_bias": {5: 4.0}}, []),
)
"""Options and EOS tokens. All but the last are transformers' own."""
METHODS: dict[str, dict[str, Any]] = {
    "vanilla": {},
    "seq": {"gamma": 3},
    "tree": {"tree_shape": (2, 3, 3), "tree_nodes": 6, "lookup_branches": True},
    "lookup": {"gamma": 3},
    "magicdec": {"gamma": 3},
    "auto": {"tree_shape": (2, 3, 3)},
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GlideMixin:
    return make_pair(tmp_path_factory.mktemp("pair"), vocab_size=VOCAB, seed=3)


@pytest.fixture(scope="module")
def expected(model: GlideMixin) -> list[list[list[int]]]:
    """The answers to PROMPTS under each of OPTIONS, by transformers."""
    own = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}
    answers = []
    for options, eos in OPTIONS[:-1]:
        settings = {**own, **options, "eos_token_id": eos or None}
        whole = [GenerationMixin.generate(model, torch.tensor([prompt]), **settings)[0] for prompt in PROMPTS]
        answers.append([ids[len(prompt) :].tolist() for ids, prompt in zip(whole, PROMPTS, strict=True)])
    options, eos = OPTIONS[-1]
    return [*answers, [greedy(model, prompt, NEW_TOKENS, options, eos) for prompt in PROMPTS]]


def answers(model: GlideMixin, method: str, options: dict[str, Any], eos: Sequence[int] = ()) -> list[list[int]]:
    settings = METHODS[method] | options
    out = generate(model, list(PROMPTS), method=method, max_new_tokens=NEW_TOKENS, eos_token_id=eos, **settings)
    return [tokens.tolist() for tokens in out.new_tokens]


@pytest.mark.parametrize("method", METHODS)
def test_greedy_answers_are_transformers_own(
    model: GlideMixin, expected: list[list[list[int]]], method: str, device: str
) -> None:
    for (options, eos), own in zip(OPTIONS, expected, strict=True):
        assert answers(model.to(device), method, options, eos) == own
        assert method != "vanilla" or answers(model, method, {}, eos) != own, "the option changes nothing"


ASKED = [{}, *(options for options, eos in OPTIONS if not eos), {}]
"""The options of requests that run together: unequal answers, each under other options than its neighbors'."""


def answered(model: GlideMixin, method: str, temperature: float = 0.0) -> list[list[int]]:
    """The answers to requests with the options ASKED, in 3 rows: rows end, move and go to the next request."""
    requests = []
    for number, options in enumerate(ASKED):
        sampling = Sampling(temperature, seed=number, **token_settings(options, (), VOCAB))
        requests.append(Request(PROMPTS[number % 3], NEW_TOKENS + 3 * number, sampling))
    drafting = checked_drafting(model, Drafting(method, **METHODS[method]), True)
    found: list[list[int]] = [[] for _ in requests]
    answer_all(model, drafting, requests, 3, Listener(lambda number, event: found[number].extend(event.ids)))
    return found


@pytest.mark.parametrize(("method", "temperature"), [("tree", 0.0), ("tree", 1.0), ("lookup", 0.0)])
def test_rows_with_different_options_do_not_disturb_each_other(
    model: GlideMixin, method: str, temperature: float, device: str
) -> None:
    """Each answer is that of its request alone."""
    settings = {"method": method, "temperature": temperature, "eos_token_id": (), **METHODS[method]}
    for number, found in enumerate(answered(model.to(device), method, temperature)):
        own: dict[str, Any] = settings | ASKED[number]
        prompt = [PROMPTS[number % 3]]
        out = generate(model, prompt, max_new_tokens=NEW_TOKENS + 3 * number, seed=number, **own)
        assert out.new_tokens[0].tolist() == found


def test_penalties_of_a_neighbor_are_seen(model: GlideMixin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other faults: tests/faults.py."""
    expected = answered(model, "lookup")
    rolled = lambda rows, part: PenaltyRows(*(values.roll(1, 0)[part] for values in rows.tensors))  # noqa: E731
    monkeypatch.setattr(PenaltyRows, "narrow", rolled)
    assert answered(model, "lookup") != expected


def test_an_answer_without_a_token_left_is_refused(model: GlideMixin) -> None:
    with pytest.raises(UserError, match="options that ban tokens"):
        answers(model, "vanilla", {"suppress_tokens": [*range(VOCAB)]})


SETTINGS = {"tree_shape": (2, 3), "gamma": 3, "max_new_tokens": 12, "seed": 0}


class Spoiled(nn.Module):
    """A head whose logits of one token are `value`, for hidden states that hold a marker of `marked`."""

    def __init__(self, head: nn.Linear, marked: Tensor, value: float) -> None:
        super().__init__()
        self.head, self.weight = head, head.weight
        self.marked, self.value = marked, value

    def forward(self, hidden: Tensor) -> Tensor:
        logits = self.head(hidden)
        is_marked = (hidden[..., None, :] - self.marked).abs().amax(-1) < 1e-3
        logits[..., 5] = torch.where(is_marked.any(-1), self.value, logits[..., 5])
        return logits


def prompts() -> Tensor:
    return torch.randint(1, 61, (2, 7), generator=torch.Generator().manual_seed(0))


def spoil_target(model: GlideMixin, row: Tensor, position: int, value: float) -> None:
    """The target's logits after the tokens of `row` up to `position` hold `value`."""
    with torch.no_grad():
        hidden = model.model(row[None, : position + 1]).last_hidden_state[:, -1]
    model.lm_head = Spoiled(model.lm_head, hidden, value)  # type: ignore[assignment]


@pytest.mark.parametrize(("method", "value"), [*zip(methods.METHODS, cycle([torch.nan, torch.inf]), strict=False)])
def test_a_verification_pass_is_refused_where_the_target_fails(tmp_path: Path, method: str, value: float) -> None:
    """Every token before is the target's own; the row and the round's root are named. Prefill does the same."""
    model, ids = make_pair(tmp_path), prompts()
    expected = target_greedy(model, ids[1], 12)
    spoil_target(model, torch.cat([ids[1], torch.tensor(expected)]), 10, value)
    with pytest.raises(UserError, match=r"^row 1, position \d+: the (target|draft)'s logits") as error:
        generate(model, ids, method=method, **SETTINGS)
    position = int(str(error.value).split("position ")[1].split(":")[0])
    assert position == 10 if method == "vanilla" else 7 <= position <= 10
    ended = generate(model, ids, method=method, **SETTINGS | {"max_new_tokens": 1})
    assert [row.tolist() for row in ended.new_tokens] == [target_greedy(model, row, 1) for row in ids]
    with pytest.raises(UserError, match=r"^row 1, position 10: the target's logits are NaN or infinite"):
        later = [ids[0].tolist(), [*ids[1].tolist(), *expected[:4]]]
        generate(model, later, method=method, **SETTINGS, temperature=0.8, min_p=0.1)


@pytest.mark.parametrize(
    ("rule", "sampling"),
    [
        ({"method": "seq"}, {"temperature": 0.8}),
        ({"method": "tree"}, {}),
        ({"method": "tree", "tree_rule": "descend"}, {"temperature": 1.0, "top_p": 0.9, "repetition_penalty": 1.2}),
    ],
    ids=str,
)
def test_no_weight_of_a_draft_spoils_the_output(tmp_path: Path, rule: dict, sampling: dict) -> None:
    model = make_pair(tmp_path)
    model.draft_model.mlp.down_proj.weight.data[3, 4] = torch.nan
    with pytest.raises(UserError, match=r"^row 0, position 7: the draft's logits are NaN or infinite"):
        generate(model, prompts(), **rule, **SETTINGS, **sampling)


def test_rows_that_have_ended_raise_nothing(tmp_path: Path) -> None:
    """A row keeps passing through the rounds of the others, which may run it into anything."""
    model, ids = make_pair(tmp_path), prompts()
    first = [target_greedy(model, row, 6) for row in ids]
    eos = next(token for token in first[1] if token not in first[0])
    ended = first[1].index(eos)
    spoil_target(model, torch.cat([ids[1], torch.tensor(first[1])]), 7 + ended, float("nan"))
    out = generate(model, ids, method="vanilla", **SETTINGS | {"max_new_tokens": 6}, eos_token_id=eos)
    assert [row.tolist() for row in out.new_tokens] == [first[0], first[1][: ended + 1]]


def test_answers_in_batches_name_the_prompt(tmp_path: Path) -> None:
    """A greedy row stands next to a sampled one; no answer gets a token from the fault."""
    model, ids = make_pair(tmp_path), prompts()
    spoil_target(model, torch.cat([ids[1], torch.tensor(target_greedy(model, ids[1], 3))]), 8, float("nan"))
    requests = [Request(ids[1].tolist(), 6), Request(ids[0].tolist(), 6, Sampling(0.7))]
    with pytest.raises(UserError, match=r"^prompt 0, position 8: the target's logits are NaN .* temperature 0;"):
        answer_all(model, Drafting("vanilla"), requests, 2, Listener(lambda *_: None))
