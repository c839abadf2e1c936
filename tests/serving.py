"""A client of the scheduler for tests: it collects the events of requests."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from random import Random
from threading import Event as Signal
from typing import Any

import torch
from pairs import OPTIONS, make_pair

from longspec import generate
from longspec.inference.engine.requests import Event, Finished, PromptScores, Request, Ticket, Tokens
from longspec.inference.engine.scheduler import Scheduler
from longspec.inference.request import Sampling
from longspec.models.glide import GlideMixin

SMALL: dict[str, Any] = {"method": "tree", "tree_shape": (3, 4, 4), "gamma": 3, "memory": 2**27, "prefill_chunk": 16}
VOCAB = 7
"""Vocabulary of targets: so small that random drafts get tokens accepted."""
TIMEOUT = 60
"""Seconds; only a deadlock takes them."""


def drafted_pair(folder: Path, family: str, options: str) -> GlideMixin:
    """A pair with a draft of OPTIONS, or with a published one that has a list of tokens if options is "listed"."""
    is_listed = options == "listed"
    model = make_pair(folder, family, options=OPTIONS["published" if is_listed else options], vocab_size=VOCAB)
    model.draft_model.set_vocabulary(torch.tensor([0, 2, 5]) if is_listed else None)
    return model


def ids(events: Sequence[Event]) -> list[int]:
    """The tokens of an answer."""
    return [token for event in events if isinstance(event, Tokens) for token in event.ids]


@contextmanager
def serving(model: GlideMixin, ahead: int = 0, **settings: Any) -> Iterator[Scheduler]:
    """A scheduler that has started. ahead: see `Worker`; captured rounds have 1."""
    scheduler = Scheduler(model, **SMALL | settings)
    scheduler._worker.ahead = max(ahead, scheduler._worker.ahead)
    scheduler.start()
    try:
        yield scheduler
    finally:
        scheduler.close()


class Answer:
    """The events of one request."""

    def __init__(self, scheduler: Scheduler, request: Request, cancel_after: int | None = None) -> None:
        """cancel_after: number of `Tokens` after which the request is cancelled; 0 cancels it at once."""
        self.scheduler, self.cancel_after = scheduler, cancel_after
        self.events: list[Tokens] = []
        self.prompt_scores: list[PromptScores] = []
        self.end: Finished | None = None
        self.over = Signal()
        self.ticket: Ticket | None = None
        self.ticket = scheduler.submit(request, self.take)
        if cancel_after == 0:
            scheduler.cancel(self.ticket)

    def take(self, event: Event) -> None:
        if isinstance(event, Finished):
            assert self.end is None
            self.end = event
            self.over.set()
            return
        assert self.end is None
        if isinstance(event, PromptScores):
            assert not self.events
            self.prompt_scores.append(event)
            return
        self.events.append(event)
        if self.ticket is not None and self.cancel_after is not None and len(self.events) >= self.cancel_after:
            self.scheduler.cancel(self.ticket)

    @property
    def ids(self) -> list[int]:
        return [token for event in self.events for token in event.ids]

    @property
    def finished(self) -> Finished:
        """Waits for it."""
        assert self.over.wait(TIMEOUT)
        assert self.end is not None
        return self.end


def answers(scheduler: Scheduler, requests: Sequence[Request]) -> list[Answer]:
    """All requests at once; every answer is finished."""
    found = [Answer(scheduler, request) for request in requests]
    assert [answer.finished.message for answer in found] == [""] * len(found)
    return found


def alone(model: GlideMixin, request: Request) -> list[int]:
    """What `generate` answers to a greedy request."""
    limits = {"max_new_tokens": request.max_new_tokens, "eos_token_id": sorted(request.stop_ids) or None}
    return generate(model, torch.tensor([request.prompt]), method="vanilla", **limits).new_tokens[0].tolist()


def random_requests(count: int, vocab: int) -> list[Request]:
    """Ragged prompts and limits; a third greedy, a quarter without speculation, some truncated, some with stops."""
    random = Random(0)
    requests = []
    for number in range(count):
        prompt = [random.randrange(vocab) for _ in range(random.randint(1, 50))]
        temperature = 0.0 if number % 3 == 0 else random.choice((0.7, 1.0))
        top_p, top_k = random.choice(((1.0, 0), (0.9, 0), (1.0, 3)))
        sampling = Sampling(temperature, top_p, top_k, seed=number)
        stops = frozenset({1, 2}) if number % 5 == 0 else frozenset()
        requests.append(Request(prompt, random.randint(1, 20), sampling, stops, speculate=number % 4 != 0))
    return requests
