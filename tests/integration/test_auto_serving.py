"""Method "auto" in the server: the same answers whichever plans are played and whichever requests run next to them."""

from collections import Counter
from pathlib import Path

import pytest
from pairs import OPTIONS, every_turn, make_pair
from serving import SMALL, alone, answers, random_requests, serving

from longspec.inference.adaptive import time_cache
from longspec.inference.adaptive.controller import Controller
from longspec.inference.adaptive.plan_drafters import plans_for
from longspec.inference.adaptive.plans import Plan
from longspec.inference.engine.requests import Request, Sampling
from longspec.inference.methods import Drafting
from longspec.models.glide import GlideMixin

VOCAB = 7
PLANS = {
    plan.name
    for plan in plans_for(Drafting("auto", SMALL["tree_shape"], SMALL["gamma"]), on_cpu=True, rows=1, is_served=True)
}


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GlideMixin:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(time_cache, "REPLAYS", 1)
    return make_pair(tmp_path / "pair", "qwen2", options=OPTIONS["both"], vocab_size=VOCAB)


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Rounds by plan. Plans take turns, in an order in which every plan follows every other one."""
    counts: Counter[str] = Counter()
    turns = every_turn(len(PLANS))

    def choose(self: Controller) -> Plan:
        plan = self.plans[next(turns)]
        self.impose(plan)
        counts[plan.name] += 1
        return plan

    monkeypatch.setattr(Controller, "choose", choose)
    return counts


def test_greedy_answers_are_those_of_generate_under_every_change_of_plan(
    model: GlideMixin, played: Counter[str]
) -> None:
    """Rows move, end and restart while plans change."""
    requests = [Request(request.prompt, 30) for request in random_requests(8, VOCAB)]
    with serving(model, method="auto", max_rows=3) as scheduler:
        together = answers(scheduler, requests)
    assert [answer.ids for answer in together] == [alone(model, request) for request in requests]
    assert set(played) == PLANS
    assert min(played.values()) > 5
    origins = {origin for answer in together for event in answer.events for origin in event.origins}
    assert origins == {"target", "lookup", "draft"}


def test_a_seeded_request_gets_the_same_answer_next_to_others(model: GlideMixin, played: Counter[str]) -> None:
    """While it runs no plan is chosen, and before it starts rounds of every plan were played."""
    seeded = Request([1, 2, 3, 1, 2], 40, Sampling(temperature=1.0, seed=5))
    others = [Request([3, 1] * number, 12 + 9 * number) for number in range(1, 4)]
    with serving(model, method="auto", max_rows=1) as scheduler:
        expected = answers(scheduler, [seeded])[0].ids
        assert not played
    with serving(model, method="auto", max_rows=3) as scheduler:
        for requests in ([*others, seeded], [seeded, *others], [others[2], seeded, others[0]]):
            assert answers(scheduler, requests)[requests.index(seeded)].ids == expected
    assert set(played) == PLANS
