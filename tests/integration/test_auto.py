"""Method "auto", in `generate` and in the server: the target's own tokens whichever plans are played."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from enumeration import p_value
from pairs import OPTIONS, every_turn, make_pair, ragged_prompts, target_greedy
from serving import SMALL, VOCAB, alone, answers, random_requests, serving

from longspec import generate
from longspec.inference import engine_pool
from longspec.inference.adaptive import time_cache
from longspec.inference.adaptive.controller import Controller
from longspec.inference.adaptive.plan_drafters import PlanDrafters, plans_for
from longspec.inference.adaptive.plans import Plan
from longspec.inference.adaptive.time_cache import RoundTimes, forget_times
from longspec.inference.engine import batch as batch_module
from longspec.inference.engine.batch import Batch
from longspec.inference.engine.requests import Request
from longspec.inference.engine.rounds import Mode
from longspec.inference.methods import Drafting
from longspec.inference.request import Sampling
from longspec.models.draft_layer import DraftOptions
from longspec.models.glide import GlideMixin
from longspec.user_cache import user_cache

SETTINGS: dict[str, Any] = {"method": "auto", "tree_shape": (3, 6, 6), "max_new_tokens": 30}


@pytest.fixture(autouse=True)
def few_replays(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time_cache, "REPLAYS", 1)


@pytest.fixture
def every_plan(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Rounds by plan. Plans take turns, in an order in which every plan follows every other one."""
    counts: Counter[str] = Counter()
    turns: list[Iterator[int]] = []

    def choose(self: Controller) -> Plan:
        if not turns:
            turns.append(every_turn(len(self.plans)))
        plan = self.impose(self.plans[next(turns[0])])
        counts[plan.name] += 1
        return plan

    monkeypatch.setattr(Controller, "choose", choose)
    return counts


@pytest.mark.parametrize("options", ["published", "both"])
@pytest.mark.usefixtures("every_plan")
def test_every_change_of_plan_keeps_the_targets_tokens(tmp_path: Path, options: str, device: str) -> None:
    """In a ragged batch, twice on the same engine, whose rounds are captured on a GPU."""
    model = make_pair(tmp_path, options=OPTIONS[options], initializer_range=0.1).to(device)
    ids, mask, rows = ragged_prompts(1, 40, 9)
    expected = [target_greedy(model, row, 60) for row in rows]
    for _ in range(2):
        out = generate(model, ids, mask, **(SETTINGS | {"max_new_tokens": 60}))
        assert [new.tolist() for new in out.new_tokens] == expected
        plans = plans_for(Drafting("auto", (3, 6, 6)), device == "cpu", len(rows))
        assert set(out.stats.rounds_by_plan) == {plan.name for plan in plans}
        assert sum(out.stats.rounds_by_plan.values()) == max(out.stats.row_rounds)


@torch.no_grad()
@pytest.mark.usefixtures("every_plan")
def test_sampled_tokens_follow_the_targets_law_under_every_change_of_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chi-square test of three tokens, over all 64 outcomes."""
    names = ("vanilla", "lookup 5", "lookup 16", "tree 5 of 2 levels", "tree 7 of 3 levels")
    times = RoundTimes((64, 1024), dict.fromkeys(names, (1.0, 2.0)), 0.1)
    monkeypatch.setattr(batch_module, "measure_times", lambda *_: times)
    model = make_pair(tmp_path, vocab_size=4, num_hidden_layers=2, options=DraftOptions(window=32))
    prompt, rows = torch.tensor([3, 1, 0, 2, 2, 1, 3]), 1024
    settings = SETTINGS | {"tree_shape": (2, 2, 2), "max_new_tokens": 3}
    observed = torch.zeros(64, dtype=torch.float64)
    for seed in range(6):  # they start with different plans
        out = generate(model, prompt.expand(rows, -1), temperature=1.5, seed=seed, **settings)
        observed += (torch.stack(out.new_tokens) @ torch.tensor([16, 4, 1])).bincount(minlength=64)

    texts = torch.cartesian_prod(*[torch.arange(4)] * 3)
    logits = model(torch.cat([prompt.expand(64, -1), texts], 1)).logits[:, 6:9] / 1.5
    law = logits.double().log_softmax(-1).gather(2, texts[..., None]).sum((1, 2)).exp()
    assert p_value(observed[None], law[None]) > 1e-4


@torch.no_grad()
@pytest.mark.usefixtures("every_plan")
def test_a_tree_after_other_plans_is_that_of_a_draft_that_read_every_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Other plans do not fill the draft's window; it is filled again before the next tree."""
    model = make_pair(tmp_path, options=DraftOptions(window=16), initializer_range=0.1)
    ids, _, (row,) = ragged_prompts(40)
    play = Batch.play
    checked = []

    def checking(self: Batch, mode: Mode, size: int) -> Any:
        result = play(self, mode, size)
        assert mode.plan is not None and isinstance(self.drafter, PlanDrafters)
        if mode.plan.kind == "tree":
            assert self.drafter.tree is not None
            draft, length = self.drafter.tree.draft, int(self.cache.lengths[0])
            ring = draft.cache.keys.clone()
            self.drafter.refill(self.cache.lengths)
            positions = torch.arange(max(0, length - 16), length) % 16
            torch.testing.assert_close(ring[:, :, positions], draft.cache.keys[:, :, positions])
            assert self.drafter.history.tokens[0, :length].tolist() == (row.tolist() + tokens)[:length]
            checked.append(length)
        return result

    monkeypatch.setattr(Batch, "play", checking)
    tokens = target_greedy(model, row, 80)  # the last round can go past the limit
    assert generate(model, ids, **(SETTINGS | {"max_new_tokens": 60})).new_tokens[0].tolist() == tokens[:60]
    assert len(checked) > 3


def test_the_same_seed_and_table_give_the_same_output(tmp_path: Path) -> None:
    """Also in a new engine; the times come from the file, and other seeds give other tokens."""
    model = make_pair(tmp_path / "pair", initializer_range=0.1)
    ids, mask, _ = ragged_prompts(20, 7)
    drawn, plans = [], []
    for seed in (1, 2, 1):
        out = generate(model, ids, mask, temperature=1.0, seed=seed, **SETTINGS)
        drawn.append([new.tolist() for new in out.new_tokens])
        plans.append(out.stats.rounds_by_plan)
        engine_pool.release(model)
    assert drawn[0] == drawn[2] != drawn[1] and plans[0] == plans[2]
    assert len(list(user_cache("round_times").glob("*.json"))) == 1


def test_times_are_measured_once_and_unreadable_files_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sampling draws the same tokens with and without a measurement."""
    model = make_pair(tmp_path / "pair", initializer_range=0.1)
    ids, _, _ = ragged_prompts(20)
    measured, measure = [], batch_module.measure_times

    def counted(*arguments: Any) -> RoundTimes:
        start = time.perf_counter()
        names = measure(*arguments).seconds
        measured.append(time.perf_counter() - start)
        # Fixed times, so that every call chooses the same plans.
        return RoundTimes((64, 1024), dict.fromkeys(names, (1.0, 2.0)), 0.1)

    monkeypatch.setattr(batch_module, "measure_times", counted)

    def tokens(measures: bool) -> list[int]:
        engine_pool.release(model)
        torch.manual_seed(3)
        measured.clear()
        out = generate(model, ids, temperature=1.0, **SETTINGS)
        assert bool(measured) == measures and out.stats.measure_s >= sum(measured)
        return out.new_tokens[0].tolist()

    first = tokens(measures=True)
    (file,) = user_cache("round_times").glob("*.json")
    whole = json.loads(file.read_text())
    assert tokens(measures=False) == first
    for damage in ("", "{", "[]", json.dumps(whole | {"times": {}}), json.dumps(whole | {"expires": time.time() - 1})):
        file.write_text(damage)
        assert tokens(measures=True) == first
        again = json.loads(file.read_text())
        assert again["times"] == whole["times"] and again["expires"] > time.time()
    forget_times()
    assert tokens(measures=True) == first


def test_an_unwritable_cache_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    model = make_pair(tmp_path / "pair")
    ids, _, (row,) = ragged_prompts(20)
    assert generate(model, ids, **SETTINGS).new_tokens[0].tolist() == target_greedy(model, row, 30)
    assert "are not kept" in caplog.text


def test_a_relative_cache_folder_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "cache")
    assert user_cache("targets") == Path.home() / ".cache" / "longspec" / "targets"


def test_the_plans_follow_the_options_of_trees_and_chains(model: GlideMixin) -> None:
    ids, _, (row,) = ragged_prompts(20)
    out = generate(model, ids, **SETTINGS, tree_nodes=4, gamma=2)
    assert out.new_tokens[0].tolist() == target_greedy(model, row, 30)
    assert set(out.stats.rounds_by_plan) <= {"vanilla", "lookup 3", "tree 4 of 2 levels", "tree 4 of 3 levels"}


SERVED = Drafting("auto", SMALL["tree_shape"], SMALL["gamma"])
SERVED_PLANS = {plan.name for plan in plans_for(SERVED, on_cpu=True, rows=1, is_served=True)}


@pytest.fixture
def served(tmp_path: Path) -> GlideMixin:
    return make_pair(tmp_path / "pair", "qwen2", options=OPTIONS["both"], vocab_size=VOCAB)


def test_greedy_answers_of_a_server_are_those_of_generate_under_every_change_of_plan(
    served: GlideMixin, every_plan: Counter[str]
) -> None:
    """Rows move, end and restart while plans change."""
    requests = [Request(request.prompt, 30) for request in random_requests(8, VOCAB)]
    with serving(served, method="auto", max_rows=3) as scheduler:
        together = answers(scheduler, requests)
    assert [answer.ids for answer in together] == [alone(served, request) for request in requests]
    assert set(every_plan) == SERVED_PLANS and min(every_plan.values()) > 5
    origins = {origin for answer in together for event in answer.events for origin in event.origins}
    assert origins == {"target", "lookup", "draft"}


def test_a_seeded_request_gets_the_same_answer_next_to_others(served: GlideMixin, every_plan: Counter[str]) -> None:
    """While it runs no plan is chosen, and before it starts rounds of every plan were played."""
    seeded = Request([1, 2, 3, 1, 2], 40, Sampling(temperature=1.0, seed=5))
    others = [Request([3, 1] * number, 12 + 9 * number) for number in range(1, 4)]
    with serving(served, method="auto", max_rows=1) as scheduler:
        expected = answers(scheduler, [seeded])[0].ids
        assert not every_plan
    with serving(served, method="auto", max_rows=3) as scheduler:
        for requests in ([*others, seeded], [seeded, *others], [others[2], seeded, others[0]]):
            assert answers(scheduler, requests)[requests.index(seeded)].ids == expected
    assert set(every_plan) == SERVED_PLANS
