"""A row that the worker moves goes on as if nothing had happened, and so does the row that gives way."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from calls import noted
from serving import SMALL, alone, drafted_pair, ids

from longspec.inference.engine import batch_rows
from longspec.inference.engine.batch import LEAST_ROUNDS, Batch
from longspec.inference.engine.requests import Event, Finished, Request, Tokens
from longspec.inference.engine.scheduler import Scheduler
from longspec.inference.request import Sampling
from longspec.models.glide import GlideMixin

pytestmark = pytest.mark.usefixtures("own_cache")
LONG = Request([4, 1] * 30, 40, Sampling(1.0, seed=1), trace=True)
"""Runs in the last row until the rows before it are free."""
PENALIZED = replace(LONG, sampling=Sampling(1.0, seed=1, frequency_penalty=0.7, no_repeat_ngram_size=3))


class Session:
    """A worker without its thread: requests begin, and rounds are played, in a known order."""

    def __init__(self, model: GlideMixin, max_rows: int, ahead: int = 0, **settings: Any) -> None:
        scheduler = Scheduler(model, **SMALL | {"max_rows": max_rows} | settings)
        self.engine, self.worker = scheduler.engine, scheduler._worker
        self.worker.ahead = ahead
        self.batch = self.worker.batch
        self.events: list[list[Event]] = []
        scheduler.engine.prepare()
        self.sizes = noted(pytest.MonkeyPatch(), self.batch, "rounds", lambda mode, size: size)
        """Rows of each round."""

    def finish(self, requests: Sequence[Request]) -> list[list[Tokens]]:
        """Submit requests and play until all answers have ended."""
        for request in requests:
            self.events.append([])
            self.engine.add(request, self.events[-1].append)
        while self.engine.clients.open:
            self.engine.step()
        assert all(isinstance(events[-1], Finished) and not events[-1].message for events in self.events)
        return [[event for event in events if isinstance(event, Tokens)] for events in self.events]


@torch.no_grad()
@pytest.mark.parametrize("ahead", [0, 1])
def test_rounds_over_a_row_that_has_ended_stay_within_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    """The row reaches the largest length in rounds that accept all nodes, and rounds of the others go on over it."""
    capacity = 256
    monkeypatch.setattr("longspec.inference.memory.row_capacity", lambda *_: capacity)
    model = drafted_pair(tmp_path, "qwen2", "published")
    session = Session(model, 4, ahead, method="lookup", gamma=15)
    session.batch.sizes = [1, 2, 4]  # as where rounds are captured
    longest = session.engine.longest
    looping = alone(model, Request([3], longest))
    requests = [Request(looping[: longest - 33], 33), *(Request([token], 80) for token in (1, 2, 4))]
    assert [ids(answer) for answer in session.finish(requests)] == [alone(model, request) for request in requests]


@torch.no_grad()
@pytest.mark.parametrize(
    ("options", "settings", "long", "ahead"),
    [
        ("both", {}, LONG, 0),
        ("listed", {"tree_nodes": 10, "lookup_branches": True}, LONG, 1),
        ("listed", {"method": "seq"}, LONG, 0),
        ("both", {"method": "lookup"}, LONG, 1),
        ("both", {"method": "magicdec"}, LONG, 0),
        ("both", {"method": "auto"}, LONG, 0),
        ("listed", {}, PENALIZED, 1),
    ],
    ids=["tree", "lookup branches", "seq", "lookup", "magicdec", "auto", "penalties"],
)
def test_rows_that_are_exchanged_go_on_as_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, options: str, settings: Any, long: Request, ahead: int
) -> None:
    """The row that gives way is read on in its new place, amid its prompt. An exchange copies two layers, then one."""
    model = drafted_pair(tmp_path, "qwen2", options)
    late = Request([2, 6, 3, 3, 5] * 25, 6)
    session = Session(model, 3, ahead, **settings)

    def exchange(a: list[int], b: list[int], length: int) -> tuple[list[int], list[int], bool]:
        slot_bytes = session.batch.cache.keys[0, 0, :, 0].nbytes
        monkeypatch.setattr(batch_rows, "EXCHANGED_BYTES", 2 * length * slot_bytes)
        return a, b, session.worker.rows[b[0]] in session.worker.intake.reading

    moves = noted(monkeypatch, session.batch, "move", exchange)
    short = [Request([1, 2], 10, speculate=False), Request([3] * 20, 30, speculate=False)]
    answers = session.finish([*short, long, late])
    assert moves[0] == ([2], [0], True), "no row in prefill gave way"
    assert session.sizes[-1] < max(session.sizes), "rounds are as small as the running rows allow"
    for request, answer in zip((*short, late), (*answers[:2], answers[3]), strict=True):
        assert ids(answer) == alone(model, request)
    unmoved = Session(model, 1, **settings).finish([long])[0]
    assert ids(answers[2]) == ids(unmoved)
    assert [event.tree for event in answers[2]] == [event.tree for event in unmoved]


def test_a_smaller_round_is_captured_once_many_rounds_would_fit() -> None:
    """Before that, the largest size serves all rounds."""
    batch = Batch.__new__(Batch)
    runner = SimpleNamespace(capturable=True)
    vars(batch).update(details=False, runner=runner, sizes=[1, 2, 8], max_rows=8, _covered=Counter())
    sizes = [batch.size_of_next(size) for size in [8, 2, *[1] * (LEAST_ROUNDS + 1)]]
    assert sizes == [8, 8, *[8] * (LEAST_ROUNDS - 1), 2, 1]
