"""The engine on the calling thread: what one step reads, and how requests end."""

from dataclasses import replace
from itertools import cycle
from typing import Any

import pytest
import torch
from pairs import make_pair, target_greedy
from serving import ids

from longspec.errors import UserError
from longspec.inference.adaptive.controller import Controller
from longspec.inference.adaptive.time_cache import RoundTimes
from longspec.inference.answering import Listener, answer_all
from longspec.inference.engine.prefill import PREFILL_TOKENS
from longspec.inference.engine.request_engine import EngineSettings, RequestEngine
from longspec.inference.engine.requests import Event, Finished, Request
from longspec.inference.memory import chunk_bytes
from longspec.inference.methods import Drafting
from longspec.inference.sampling import GREEDY_KIND
from longspec.inference.stats import GenerationStats, pool
from longspec.models.glide import GlideMixin

VOCAB = 7
VANILLA = Drafting("vanilla")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GlideMixin:
    return make_pair(tmp_path_factory.mktemp("pair"), vocab_size=VOCAB)


def test_short_prompts_are_read_in_one_pass_and_a_long_prefix_once(model: GlideMixin) -> None:
    long = [1, 2, 3, 4, 5] * 20
    prompts = [[1, 2], [3] * 9, [4, 5, 6], long, [*long, 6], [*long, 2]]
    engine = RequestEngine(model, EngineSettings(VANILLA, 6, memory=2**27, prefill_chunk=256))
    read, passes = engine.batch.read_prompts, []

    def noted(rows: slice, chunks: Any, start: int) -> Any:
        passes.append([len(chunk) for chunk in chunks])
        return read(rows, chunks, start)

    engine.batch.read_prompts = noted  # type: ignore[method-assign]
    answers: list[list[Event]] = [[] for _ in prompts]
    tickets = [engine.add(Request(prompt, 5), take.append) for prompt, take in zip(prompts, answers, strict=True)]
    while engine.step():
        pass
    # 256 tokens at most, with padding. Fewer than 64 tokens of the prefix are not waited for.
    assert passes == [[2, 9, 3, 64], [36, 37, 37]]
    for prompt, events in zip(prompts, answers, strict=True):
        assert ids(events) == target_greedy(model, torch.tensor(prompt), 5)
    assert [ticket.cached_prompt_tokens for ticket in tickets] == [0, 0, 0, 0, 64, 64]


def test_rows_are_given_up_for_long_requests(model: GlideMixin, monkeypatch: pytest.MonkeyPatch) -> None:
    """With memory for two long rows, all requests get their tokens on as many rows."""
    rows: list[int] = []
    init = RequestEngine.__init__

    def small(self: RequestEngine, model: GlideMixin, settings: EngineSettings) -> None:
        memory = chunk_bytes(model.config, model.dtype, PREFILL_TOKENS) + 1_000_000
        init(self, model, replace(settings, memory=memory))
        rows.append(self.batch.max_rows)

    monkeypatch.setattr(RequestEngine, "__init__", small)
    requests = [Request([1 + number % 5] * (900 if number < 3 else 4), 6) for number in range(12)]
    found: list[list[int]] = [[] for _ in requests]
    stats = answer_all(model, VANILLA, requests, 8, Listener(lambda number, event: found[number].extend(event.ids)))
    assert found == [target_greedy(model, torch.tensor(request.prompt), 6) for request in requests]
    assert len(rows) == 1 and rows[0] < 8
    with pytest.raises(UserError, match=r"^prompt 1: "):  # it fits into no row
        answer_all(model, VANILLA, [requests[4], Request([1] * 4000, 6)], 8, Listener(print))
    assert stats.decoded_tokens == stats.rounds == 12 * 5


def test_each_answer_has_its_own_figures(model: GlideMixin) -> None:
    """They add up to those of all; a round's time is shared out once."""
    requests = [Request([1 + number % 5] * (3 + number), 4 + 2 * number) for number in range(5)]
    own: dict[int, GenerationStats] = {}
    whole = answer_all(model, Drafting("lookup"), requests, 2, Listener(lambda *_: None, own.__setitem__))
    assert [own[number].rounds for number in range(5)] == whole.row_rounds
    assert [own[number].decoded_tokens for number in range(5)] == [3 + 2 * number for number in range(5)]
    pooled = pool(list(own.values()))
    for name in ("rounds", "decoded_tokens", "accepted_by_depth", "build_s"):
        assert getattr(pooled, name) == getattr(whole, name), name
    assert 0 < pooled.decode_s <= whole.decode_s and all(stats.ttft_s > 0 for stats in own.values())
    assert sum(stats.build_s > 0 for stats in own.values()) == 1


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize("method", ["vanilla", "auto"])
def test_tokens_in_blocks_are_those_of_single_rounds(
    model: GlideMixin, ahead: int, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows end at stop tokens and limits, move together, and go to other requests; answers are longer than a block. A
    request that is cancelled has the tokens of all rounds before. With "auto", other plans come between."""
    requests = [
        Request(
            [1 + number % 5] * (3 + number), 5 + 41 * (number % 5), stop_ids=frozenset({6} if number % 2 else {0, 5})
        )
        for number in range(11)
    ]
    cancelled = Request([2, 4, 1], 2000)
    answers: list[list[list[Event]]] = []
    plans, counts = [], []
    for in_blocks in (False, True):
        turns = cycle((0, 0, 0, 0, 0, 0, 0, 1, 2, 0, 1, 3))
        monkeypatch.setattr(Controller, "choose", lambda self, t=turns: self.impose(self.plans[next(t)]))
        settings = EngineSettings(Drafting(method), 4, memory=2**27, kind=GREEDY_KIND, refill=2, in_blocks=in_blocks)
        engine = RequestEngine(model, settings)
        engine.batch.times.by_size[4] = RoundTimes((1, 2), {plan.name: (1.0, 1.0) for plan in engine.batch.plans}, 0.0)
        engine.batch.sizes, engine.worker.ahead = [1, 2, 4], ahead
        answers.append([[] for _ in range(1 + len(requests))])
        for request, events in zip([cancelled, *requests], answers[-1], strict=True):
            engine.add(request, events.append)
        tickets = list(engine.waiting)
        for _ in range(100):
            engine.step()
        engine.cancel(tickets[0])
        while engine.step():
            pass
        plans.append([ticket.plans for ticket in tickets])
        counts.append((engine.worker.counts.row_rounds, engine.worker.counts.decoded_tokens))
        if (controller := engine.worker.controller) is not None:  # it knows the texts up to the last rounds
            texts = [
                request.prompt + ids(events)
                for request, events in zip([cancelled, *requests], answers[-1], strict=True)
            ]
            for text, length in zip(controller.traces.texts.tolist(), controller.traces.lengths, strict=True):
                assert text[:length] in [other[:length] for other in texts]
    single, blocks = answers
    assert plans[0] == plans[1] and counts[0] == counts[1]
    assert [ids(events) for events in blocks] == [ids(events) for events in single]
    assert (
        max(len(events) for events in blocks) < (12 if method == "vanilla" else 80)
        and max(len(events) for events in single) > 90
    )
    expected = target_greedy(model, torch.tensor(cancelled.prompt), 100)
    assert ids(blocks[0])[:90] == expected[:90]
    assert [events[-1].reason for events in blocks if isinstance(events[-1], Finished)] == [
        events[-1].reason for events in single if isinstance(events[-1], Finished)
    ]
