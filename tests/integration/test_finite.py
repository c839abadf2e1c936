"""Logits that define no distribution end a generation with the row and the position, and never change its output."""

from itertools import cycle
from pathlib import Path

import pytest
import torch
from pairs import make_pair, target_greedy
from torch import Tensor, nn

from longspec import generate
from longspec.errors import UserError
from longspec.inference.answering import Listener, answer_all
from longspec.inference.engine.requests import Request
from longspec.inference.methods import METHODS, Drafting
from longspec.inference.request import Sampling
from longspec.models.glide import GlideMixin

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


@pytest.mark.parametrize(("method", "value"), [*zip(METHODS, cycle([float("nan"), float("inf")]), strict=False)])
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


def test_a_logit_of_minus_infinity_is_a_token_of_probability_0(tmp_path: Path) -> None:
    """As for transformers' own sampling."""
    model, ids = make_pair(tmp_path), prompts()
    token = target_greedy(model, ids[0], 1)[0]
    logits = model(ids[:1]).logits[0, -1]
    spoil_target(model, ids[0], 6, -torch.inf)
    found = generate(model, ids[:1], method="vanilla", **SETTINGS | {"max_new_tokens": 1}).new_tokens[0]
    logits[5] = -torch.inf
    assert found.tolist() == [int(logits.argmax())] and (token == 5 or found.tolist() == [token])


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
