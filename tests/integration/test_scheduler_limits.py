"""The scheduler under misuse: refusals, cancellation, failures of one request and of the engine, shutdown, leaks."""

import gc
import threading
import weakref
from pathlib import Path
from random import Random
from typing import Any

import psutil
import pytest
import torch
from pairs import make_pair
from serving import VOCAB, Answer, alone, answers, random_requests, serving

from longspec.errors import UserError
from longspec.inference.engine.requests import Event, Finished, NotServing, QueueFull, Request, RequestTooLarge
from longspec.inference.request import Sampling
from longspec.models.draft_layer import DraftOptions
from longspec.models.glide import GlideMixin

POISON = 6
"""The token that gets an embedding of NaN."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> GlideMixin:
    options = DraftOptions(target_feature=True)
    return make_pair(tmp_path_factory.mktemp("pair"), "llama", options=options, vocab_size=VOCAB)


def test_refusals(model: GlideMixin) -> None:
    with serving(model, max_rows=1, memory=2**20, max_queue=2) as scheduler:
        limit = scheduler.longest
        assert limit == scheduler.batch.capacity - scheduler.batch.depth - 1 - scheduler.batch.nodes
        with pytest.raises(RequestTooLarge, match=f"more than the {limit} positions of a row"):
            scheduler.submit(Request([1] * (limit - 4), 5), print)
        for request in (Request([]), Request([VOCAB]), Request([1], sampling=Sampling(-1.0)), Request([1], 0)):
            with pytest.raises(UserError):
                scheduler.submit(request, print)
        with pytest.raises(UserError, match="seed"):
            scheduler.submit(Request([1], sampling=Sampling(seed=-1)), print)
        fitting = Answer(scheduler, Request([1] * (limit - 5), 5, Sampling(1.0, seed=2**64 - 1)))
        assert fitting.finished.reason == "length" and len(fitting.ids) == 5
        running = Answer(scheduler, Request([1], 100))
        while not running.events:  # it has left the queue
            pass
        queued = [Answer(scheduler, Request([2], 1)) for _ in range(2)]
        with pytest.raises(QueueFull, match="2 requests are waiting"):
            scheduler.submit(Request([3], 1), print)
        assert scheduler.snapshot().queued == 2
        assert [answer.finished.reason for answer in (running, *queued)] == ["length"] * 3


@pytest.mark.parametrize("ahead", [0, 1])
def test_cancellation_frees_the_row_within_one_round(model: GlideMixin, ahead: int) -> None:
    with serving(model, ahead, max_rows=2) as scheduler:
        steady = Answer(scheduler, Request([1, 2], 60))
        cancelled = Answer(scheduler, Request([3], 1000), cancel_after=3)
        queued = Answer(scheduler, Request([4], 1000), cancel_after=0)
        following = Answer(scheduler, Request([3], 9))
        ended = [Answer(scheduler, Request([5], 1000)) for _ in range(2)]
        for answer in ended:  # whose client has found a stop string
            scheduler.cancel(answer.ticket, "stop")
        assert [answer.finished.reason for answer in ended] == ["stop"] * 2
        assert cancelled.finished.reason == queued.finished.reason == "cancelled"
        assert len(cancelled.events) <= 4 and not queued.events
        for answer, request in ((following, Request([3], 9)), (steady, Request([1, 2], 60))):
            assert answer.finished.reason == "length" and answer.ids == alone(model, request)
        assert scheduler.snapshot().finished == {"stop": 2, "cancelled": 2, "length": 2}


@pytest.mark.parametrize("ahead", [0, 1])
def test_a_fault_ends_its_own_request(tmp_path: Path, ahead: int) -> None:
    """Before, at the same time, and afterwards in the same row, others are answered as alone."""
    model = make_pair(tmp_path, "qwen2", options=DraftOptions(target_feature=True))
    with torch.no_grad():
        model.model.embed_tokens.weight[POISON] = torch.nan
        model.lm_head.weight[POISON] = 0  # others are far more probable: no answer and no tree holds it
    good = [Request([1, 2, 3], 20), Request([4, 5], 20, Sampling(1.0, seed=1)), Request([2], 20, speculate=False)]
    with serving(model, max_rows=1) as scheduler:
        expected = [answers(scheduler, [request])[0].ids for request in good]
    with serving(model, ahead, max_rows=4) as scheduler:
        first = [Answer(scheduler, request) for request in good]
        bad = [Answer(scheduler, Request([1, POISON, 2], 30, sampling)) for sampling in (Sampling(), Sampling(0.8))]
        later = [Answer(scheduler, request) for request in good * 2]
        for answer in bad:
            assert answer.finished.reason == "error"
            assert answer.finished.message.startswith("position 2: the target's logits are NaN or infinite")
        assert [answer.finished.reason for answer in first + later] == ["length"] * 9
        assert [answer.ids for answer in first + later] == expected * 3 and scheduler.snapshot().healthy
    spoiled = Request([1, 2, 3, 4, 5, POISON], 8)
    with serving(model, ahead, max_rows=1) as scheduler:
        assert Answer(scheduler, spoiled).finished.reason == "error"
        assert answers(scheduler, good[:1])[0].ids == expected[0]  # shorter: the draft's window has slots that it skips


def test_a_failing_callback_or_prefill_ends_its_own_request(model: GlideMixin, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []

    def fail(event: Event) -> None:
        events.append(event)
        if not isinstance(event, Finished):
            raise RuntimeError("the client's code")

    with serving(model, max_rows=2) as scheduler:
        read_prompts = scheduler.batch.read_prompts

        def fail_at_five(rows: slice, chunks: Any, start: int) -> torch.Tensor:
            if any(chunk[0] == 5 for chunk in chunks):
                raise RuntimeError("no memory")
            return read_prompts(rows, chunks, start)

        monkeypatch.setattr(scheduler.batch, "read_prompts", fail_at_five)
        scheduler.submit(Request([1], 1000), fail)
        good, bad = (Answer(scheduler, Request([first, 2], 20)) for first in (1, 5))
        assert (bad.finished.reason, bad.finished.message) == ("error", "prefill failed: no memory")
        assert good.finished.reason == "length" and good.ids == alone(model, Request([1, 2], 20))
        assert scheduler.drain(60)
    assert isinstance(events[-1], Finished) and len(events) <= 4
    assert (events[-1].reason, events[-1].message) == ("error", "on_event failed: the client's code")


@pytest.mark.parametrize("call", ["assign", "rounds"])
def test_a_failed_engine_ends_all_requests(model: GlideMixin, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    """Those between queue and row, too."""

    def fail(*mode: Any) -> Any:
        raise RuntimeError("device lost")

    with serving(model, max_rows=2) as scheduler:
        monkeypatch.setattr(scheduler.batch, call, fail)
        lost = []
        for number in range(5):
            try:
                lost.append(Answer(scheduler, Request([number], 9)))
            except NotServing:
                break
        assert lost and all(answer.over.wait(5) for answer in lost), "a request never ended"
        assert {answer.finished.reason for answer in lost} == {"error"}
        assert {answer.finished.message for answer in lost} == {"the engine failed: device lost"}
        snapshot = scheduler.snapshot()
        assert (snapshot.healthy, snapshot.error) == (False, "the engine failed: device lost")
        assert snapshot.running == snapshot.queued == 0 and snapshot.finished == {"error": len(lost)}
        with pytest.raises(NotServing, match="device lost"):
            scheduler.submit(Request([1]), print)


def test_shutdown(model: GlideMixin) -> None:
    with serving(model, max_rows=2) as scheduler:
        finishing = [Answer(scheduler, Request([1, number], 10)) for number in range(4)]
        assert scheduler.drain(60)
        assert [answer.finished.reason for answer in finishing] == ["length"] * 4
        with pytest.raises(NotServing, match="shutting down"):
            scheduler.submit(Request([1]), print)
    with serving(model, max_rows=2) as scheduler:
        cut_off = [Answer(scheduler, Request([1, number], 3000)) for number in range(4)]
        assert not scheduler.drain(0.01)
        scheduler.close()
        with pytest.raises(NotServing, match="shutting down"):
            scheduler.submit(Request([1]), print)
        assert [answer.finished.reason for answer in cut_off] == ["cancelled"] * 4
        assert not scheduler.snapshot().healthy


def test_many_requests_leak_nothing(model: GlideMixin) -> None:
    """A third of them is cancelled at random times, some before they start. The first ones warm up."""
    random = Random(0)
    with serving(model, ahead=1, max_rows=8, max_queue=1000) as scheduler:
        for count in (40, 100):
            threads, resident = set(threading.enumerate()), psutil.Process().memory_info().rss
            cancelled = [None, *(random.choice((None, None, None, 0, 1, 3)) for _ in range(count - 1))]
            given = zip(random_requests(count, VOCAB), cancelled, strict=True)
            found = [Answer(scheduler, request, cancel_after) for request, cancel_after in given]
            assert all(answer.finished.reason != "error" for answer in found)
            tickets = [weakref.ref(answer.ticket) for answer in found if answer.ticket]
            found.clear()
        assert scheduler.drain(60)
        gc.collect()
        snapshot = scheduler.snapshot()
        assert sum(snapshot.finished.values()) == snapshot.requests == 140 and snapshot.finished["cancelled"] > 20
        assert snapshot.running == snapshot.queued == 0 and not scheduler.batch.active.any()
        assert threads.issuperset(threading.enumerate()) and not [ticket for ticket in tickets if ticket() is not None]
        assert psutil.Process().memory_info().rss < 1.02 * resident
