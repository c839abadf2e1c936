"""What is generated above temperature 0 follows the target's own distribution, and planted faults do not pass.

A vocabulary of 4 and three tokens: 64 outcomes, whose exact probabilities the target alone gives. Chi-square tests at a
family-wise level of 1e-3 over all of them; what they can see is itself tested.
"""

from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from enumeration import hardest_to_see, p_value
from faults import IN_CORRELATIONS, IN_THE_OUTPUT, PENALTY_FAULTS
from pairs import FAMILIES, make_pair
from penalty_reference import processed, transformers_warpers
from torch import Tensor

from longspec import generate
from longspec.inference.drafting import lookup, magicdec, reduced_head
from longspec.models.draft_layer import DraftOptions
from longspec.models.glide import GlideMixin

VOCAB = 4
METHODS: dict[str, dict[str, Any]] = {
    "vanilla": {"method": "vanilla"},
    "seq": {"method": "seq", "gamma": 2},
    "tree, descend": {"method": "tree", "tree_shape": (2, 3), "tree_rule": "descend"},
    "tree": {"method": "tree", "tree_shape": (2, 3)},
    "magicdec": {"method": "magicdec", "gamma": 2},
    "lookup": {"method": "lookup", "gamma": 2},
}
BUDGETS: dict[str, dict[str, Any]] = {
    "tree, descend, budget": {"method": "tree", "tree_shape": (2, 3), "tree_rule": "descend", "tree_nodes": 4},
    "tree, budget": {"method": "tree", "tree_shape": (2, 3), "tree_nodes": 4},
    "tree, lookup": {"method": "tree", "tree_shape": (2, 3), "tree_nodes": 7, "lookup_branches": True},
}
"""Trees of which some nodes are verified, one with lookup branches."""
TEMPERATURES = (0.6, 1.0, 1.5)
EXTRA_WARPS: tuple[dict[str, Any], ...] = tuple(
    {"temperature": 1.5} | warp for warp in ({"min_p": 0.25}, {"typical_p": 0.8}, {"epsilon_cutoff": 0.15})
)
PENALTIES: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0, "repetition_penalty": 1.8, "presence_penalty": 0.6, "frequency_penalty": 0.9},
    {"temperature": 1.5, "no_repeat_ngram_size": 3, "bad_words_ids": [[1, 2], [0, 0]], "logit_bias": {3: 1.0}},
)
# Each method, warper and temperature, and penalties with each way to verify. That rows are warped as transformers does
# it is tested for the one sampler (tests/unit/test_penalties.py).
WARPS = ({}, {"top_p": 0.8}, {"top_k": 3})
TURNS = zip(METHODS, cycle(TEMPERATURES), cycle(WARPS), strict=False)
CASES = [(method, {"temperature": temperature} | warp) for method, temperature, warp in TURNS]
CASES += [*zip(("tree", "seq", "tree, descend"), EXTRA_WARPS, strict=True)]
CASES += [*zip(("seq", "tree, descend", "tree", "lookup"), cycle(PENALTIES), strict=False)]
# One setting a method in the fast tests, each temperature and each warper once.
FAST_WARPS: tuple[dict[str, Any], ...] = (
    {"temperature": 1.0},
    {"temperature": 0.6},
    {"temperature": 1.0, "top_p": 0.8},
    {"temperature": 1.5, "top_k": 3},
    {"temperature": 1.0},
    {"temperature": 0.6, "top_p": 0.8},
)
FAST = list(zip(METHODS, FAST_WARPS, strict=True))
FAST += zip(BUDGETS, ({"temperature": 1.0}, {"temperature": 1.5, "top_k": 3}, PENALTIES[0]), strict=True)
LEVEL = 1e-3 / (len(CASES) + len(FAST))
TRIALS, FAST_TRIALS = 2**16, 2**13
"""Rows of the slow tests and of the fast ones."""
DISTANCE, FAST_DISTANCE = 0.028, 0.08
"""Total-variation error that they show."""
PROMPTS = torch.tensor([[0, 0, 0, 0, 0, 0, 2], [3, 1, 0, 2, 2, 1, 3]])
FAULTS = IN_THE_OUTPUT | PENALTY_FAULTS
MASK = torch.tensor([[0, 0, 0, 0, 0, 0, 1], [1, 1, 1, 1, 1, 1, 1]])


@pytest.fixture(params=["llama"])
def model(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GlideMixin:
    """Drafts are often wrong; windows are short, so that the draft's window turns and magicdec leaves keys out."""
    monkeypatch.setattr(magicdec, "SINK", 1)
    monkeypatch.setattr(magicdec, "RECENT", 2)
    monkeypatch.setattr(lookup, "BRANCH_SIZES", (3, 1))  # of which three tokens use all
    layout = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_key_value_heads": 1}
    layout |= {"vocab_size": VOCAB, "num_attention_heads": 2}
    return make_pair(tmp_path, request.param, seed=1, options=DraftOptions(window=8), **layout)


def samples(model: GlideMixin, method: str, warp: dict[str, Any], rows: int, count: int, seed: int = 0) -> Tensor:
    """`count` tokens of `rows` rows [rows, count], in turn after each of PROMPTS, in large ragged batches."""
    found = []
    for start in range(0, rows, 2**15):
        times = min(2**15, rows - start) // len(PROMPTS)
        ids, mask = PROMPTS.repeat(times, 1), MASK.repeat(times, 1)
        out = generate(model, ids, mask, **(METHODS | BUDGETS)[method], **warp, max_new_tokens=count, seed=seed + start)
        found += out.new_tokens
    return torch.stack(found).cpu()


def target_probabilities(model: GlideMixin, prompt: Tensor, tokens: Tensor, warp: dict[str, Any]) -> Tensor:
    """The target's own law [rows, T, V] of each of `tokens` [rows, T] after `prompt` [P], by transformers alone."""
    warpers = transformers_warpers(warp["temperature"], warp)
    ids = torch.cat([prompt.expand(len(tokens), -1), tokens], 1).to(model.device)
    with torch.no_grad():
        logits = model(ids).logits[:, len(prompt) - 1 : -1]
    ends = range(len(prompt), ids.shape[1])
    own = [processed(ids[:, :end], logits[:, number], len(prompt), warp) for number, end in enumerate(ends)]
    logits = torch.stack(own, 1)
    return warpers(ids, logits.flatten(0, 1)).softmax(-1).view(logits.shape).cpu()


def law_of_three(model: GlideMixin, warp: dict[str, Any]) -> Tensor:
    """[prompts, 64]: the exact probability of each three tokens after each prompt."""
    tokens = torch.cartesian_prod(*[torch.arange(VOCAB)] * 3)
    laws = []
    for prompt, mask in zip(PROMPTS, MASK, strict=True):
        p = target_probabilities(model, prompt[mask.bool()], tokens, warp)
        laws.append(p.gather(2, tokens[..., None])[..., 0].double().prod(1))
    return torch.stack(laws)


@pytest.mark.parametrize("warp", (*EXTRA_WARPS, *PENALTIES), ids=str)
def test_extra_warps_change_the_law(model: GlideMixin, warp: dict) -> None:
    """By more than the test sees, and several continuations remain."""
    plain, warped = law_of_three(model, {"temperature": warp["temperature"]}), law_of_three(model, warp)
    assert ((plain - warped).abs().sum(1) / 2 > 2 * DISTANCE).all() and ((warped > 0.02).sum(1) > 3).all()


def fit(model: GlideMixin, method: str, warp: dict[str, Any], trials: int) -> float:
    """p-value of `trials` rows against the target's law."""
    tokens = samples(model, method, warp, trials, 3)
    codes = tokens[:, 0] * VOCAB**2 + tokens[:, 1] * VOCAB + tokens[:, 2]
    # How often each three tokens came, [prompts, 64].
    counts = [codes[turn :: len(PROMPTS)].bincount(minlength=VOCAB**3) for turn in range(len(PROMPTS))]
    return p_value(torch.stack(counts), law_of_three(model, warp))


@pytest.mark.parametrize(
    ("model", "method", "warp", "trials"),
    [
        *((family, method, warp, FAST_TRIALS) for family, (method, warp) in zip(cycle(FAMILIES), FAST, strict=False)),
        *(pytest.param("llama", method, warp, TRIALS, marks=pytest.mark.slow) for method, warp in CASES),
    ],
    indirect=["model"],
)
def test_3_tokens_follow_the_targets_law(model: GlideMixin, method: str, warp: dict, trials: int, device: str) -> None:
    """For every row of a batch, whatever the other rows: two prompts of unequal length take turns."""
    assert fit(model.to(device), method, warp, trials) > LEVEL


LISTED = torch.tensor([0, 2])
"""A draft's vocabulary without 1 and 3. The first of PROMPTS has neither, the second both of them."""


@pytest.mark.parametrize(("method", "warp"), [("tree, budget", {"temperature": 0.6}), ("seq", PENALTIES[1])])
def test_tokens_of_a_draft_with_a_vocabulary_follow_the_targets_law(
    model: GlideMixin, method: str, warp: dict[str, Any], device: str
) -> None:
    model.draft_model.set_vocabulary(LISTED)
    assert fit(model.to(device), method, warp, FAST_TRIALS) > LEVEL


def test_a_token_with_two_columns_is_seen(model: GlideMixin, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompt tokens that are in the list, too, would be drawn without replacement twice."""
    model.draft_model.set_vocabulary(LISTED)
    own = reduced_head.prompt_tokens

    def also_listed(prompts: Tensor, lengths: Tensor, listed: Tensor, vocab: int) -> Tensor:
        return own(prompts, lengths, listed[:0], vocab)

    monkeypatch.setattr(reduced_head, "prompt_tokens", also_listed)
    assert fit(model, "tree", {"temperature": 1.5}, FAST_TRIALS) < LEVEL


@pytest.mark.parametrize("warp", [{"temperature": 0.6}, {"temperature": 1.0, "top_p": 0.8}, {"temperature": 1.5}])
def test_the_test_sees_small_errors(model: GlideMixin, warp: dict) -> None:
    """Of 50 samples of the law that is hardest to see at a distance, 45 or more are refused; of the right law, none."""
    generator = torch.Generator().manual_seed(0)
    laws = law_of_three(model, warp)
    for rows, trials, level, distance in (
        (laws, TRIALS // len(PROMPTS), LEVEL, DISTANCE),
        (laws, FAST_TRIALS // len(PROMPTS), LEVEL, FAST_DISTANCE),
    ):
        wrong = torch.stack([hardest_to_see(law, distance) for law in rows])
        torch.testing.assert_close((wrong - rows).abs().sum(1) / 2, torch.full((len(rows),), distance).double())
        for law, least, most in ((rows, 0, 0), (wrong, 45, 50)):
            draws = torch.multinomial(law.float().repeat(50, 1), trials, replacement=True, generator=generator)
            counts = torch.stack([row.bincount(minlength=VOCAB**3) for row in draws]).view(50, len(rows), -1)
            refused = sum(p_value(one, rows) <= level for one in counts)
            assert least <= refused <= most, f"{refused} of 50 at {distance}"


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_planted_faults_are_seen(model: GlideMixin, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first test fails for each of them, with a quarter of the rows already. Of the methods that share the faulty
    code, one is enough here (see tests/unit/test_acceptance.py)."""
    FAULTS[name].plant(monkeypatch)
    assert fit(model, FAULTS[name].methods[0], {"temperature": 1.5} | FAULTS[name].warp, TRIALS // 4) < LEVEL


def correlations(model: GlideMixin, method: str, rows: int = 2**14) -> dict[str, float]:
    """The largest standard score of correlation between tokens that should have none.

    A token's surprise is its one-hot vector less the target's law; given all that came before it has mean 0, so that
    products of surprises do too.
    """
    warp, count = {"temperature": 1.0}, 8
    tokens = samples(model, method, warp, rows, count)
    surprise = torch.empty(*tokens.shape, VOCAB, dtype=torch.float64)
    for turn, (prompt, mask) in enumerate(zip(PROMPTS, MASK, strict=True)):
        mine = tokens[turn :: len(PROMPTS)]
        law = target_probabilities(model, prompt[mask.bool()], mine, warp)
        surprise[turn :: len(PROMPTS)] = torch.nn.functional.one_hot(mine, VOCAB) - law.double()

    def score(one: Tensor, other: Tensor) -> float:
        products = (one[..., :, None] * other[..., None, :]).flatten(0, -3)
        return (products.sum(0) / products.square().sum(0).sqrt()).abs().max().item()

    return {
        "consecutive tokens": score(surprise[:, :-1], surprise[:, 1:]),
        "tokens two apart": score(surprise[:, :-2], surprise[:, 2:]),
        "tokens three apart": score(surprise[:, :-3], surprise[:, 3:]),
        "neighbouring rows": score(surprise[:-1], surprise[1:]),
        "rows of the same prompt": score(surprise[:-2], surprise[2:]),
    }


@pytest.mark.parametrize("method", ["tree", *(pytest.param(one, marks=pytest.mark.slow) for one in ("seq", "lookup"))])
def test_draws_have_nothing_to_do_with_each_other(model: GlideMixin, method: str, device: str) -> None:
    """Rows of 8 tokens: no standard score above 5.5, of 80 whose chance is 4e-8 each."""
    scores = correlations(model.to(device), method, 2**12)
    assert max(scores.values()) < 5.5, scores


@pytest.mark.slow
@pytest.mark.parametrize("name", IN_CORRELATIONS)
def test_planted_correlations_are_seen(model: GlideMixin, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    IN_CORRELATIONS[name].plant(monkeypatch)
    assert max(correlations(model, "tree").values()) > 5.5
