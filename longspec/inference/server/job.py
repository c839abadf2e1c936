"""The choices of one HTTP request: submitted together, read as one stream, cancelled together."""

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

from longspec.errors import UserError
from longspec.inference.engine.requests import (
    Event,
    Finished,
    NotServing,
    PromptScores,
    QueueFull,
    Request,
    RequestTooLarge,
    Ticket,
    Timings,
    Tokens,
    Tree,
)
from longspec.inference.engine.scheduler import Scheduler
from longspec.inference.server.answer_text import AnswerText, Piece, prompt_pieces
from longspec.inference.server.errors import SERVER_STOPPED, TOO_LONG, ApiError
from longspec.inference.server.metrics import Metrics
from longspec.inference.server.openai_api import ChatRequest, CompletionRequest

REFUSALS = {QueueFull: 429, NotServing: 503, UserError: 400}
"""The status for each reason of the engine to refuse a request."""


@dataclass
class Delta:
    """News of one choice."""

    index: int
    pieces: list[Piece]
    tree: Tree | None = None
    finish_reason: Literal["stop", "length"] | None = None
    """Set in the last delta of a choice."""
    timings: Timings | None = None


@dataclass
class Choice:
    text: AnswerText
    ticket: Ticket
    newest: float | None = None
    """time.perf_counter() of the newest token."""
    ended: bool = False
    prompt_scores: list[PromptScores] = field(default_factory=list)


@dataclass
class Job:
    """Events arrive on the engine's thread and are read on the event loop that submitted the job."""

    engine: Scheduler
    requests: Sequence[Request]
    """Those of each prompt follow one another, `body.n` per prompt."""
    body: ChatRequest | CompletionRequest
    tokenizer: Any
    deadline: float
    """Time of the event loop at which the job fails."""
    metrics: Metrics
    choices: list[Choice] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[tuple[int, Event] | None] = asyncio.Queue()
        self._drops_answers = self.body.token_limit == 0

    def submit(self) -> None:
        """Submit all choices or none. Raises ApiError."""
        stops = [stop for stop in self.body.stop if stop]
        try:
            for index, request in enumerate(self.requests):
                ticket = self.engine.submit(request, partial(self._receive, index))
                self.choices.append(Choice(AnswerText(self.tokenizer, stops), ticket))
        except tuple(REFUSALS) as error:
            self.cancel()
            status = next(status for kind, status in REFUSALS.items() if isinstance(error, kind))
            code = TOO_LONG if isinstance(error, RequestTooLarge) else None
            message = str(error).replace("max_new_tokens", self.body.limit_field)  # the engine's name for this field
            param = message.partition(":")[0] if isinstance(error, UserError) and code is None else None
            raise ApiError(status, message, param, code) from error

    def cancel(self) -> None:
        """Give back the rows of all choices that have not ended."""
        for choice in self.choices:
            if not choice.ended:
                choice.ended = True
                self.engine.cancel(choice.ticket)

    async def deltas(self) -> AsyncIterator[Delta]:
        """News of all choices in the order of arrival, up to the end of each. Raises ApiError."""
        # One timer for the answer is cheaper than a timeout for each of its events.
        expiry = self._loop.call_at(self.deadline, self._events.put_nowait, None)
        try:
            while not all(choice.ended for choice in self.choices):
                arrival = await self._events.get()
                # Events that wait in the queue are not read after the deadline, either.
                if arrival is None or self._loop.time() >= self.deadline:
                    raise ApiError(504, "the request took longer than this server allows", code="timeout")
                index, event = arrival
                # The engine learns of a stop string a round late, and until then goes on sending tokens.
                choice = self.choices[index]
                if isinstance(event, PromptScores):
                    choice.prompt_scores.append(event)
                elif not choice.ended:
                    yield self._delta(index, event)
        finally:
            expiry.cancel()

    @property
    def usage(self) -> dict[str, Any]:
        """The numbers of tokens. Those of a prompt count once."""
        step = self.body.n
        prompt = sum(len(request.prompt) for request in self.requests[::step])
        new = 0 if self._drops_answers else sum(choice.text.tokens for choice in self.choices)
        # Later choices of a prompt also reuse what the first one has read.
        cached = sum(choice.ticket.cached_prompt_tokens for choice in self.choices[::step])
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "prompt_tokens_details": {"cached_tokens": cached},
        }

    def _receive(self, index: int, event: Event) -> None:
        """Called on the engine's thread."""
        # asyncio's queues are not thread-safe, so the event loop itself puts the event into the queue.
        if not self._loop.is_closed():  # the server has ended without waiting for this request
            self._loop.call_soon_threadsafe(self._events.put_nowait, (index, event))

    def _delta(self, index: int, event: Tokens | Finished) -> Delta:
        choice, is_first = self.choices[index], self.choices[index].newest is None
        if isinstance(event, Finished):
            delta = self._finish(index, event)
        else:
            now = time.perf_counter()
            self.metrics.note(now, choice.ticket.submitted, choice.newest, len(event.ids))
            choice.newest = now
            delta = Delta(index, choice.text.add(event), event.tree)
        if choice.text.stopped and not choice.ended:
            self.engine.cancel(choice.ticket, "stop")
            choice.ended, delta.finish_reason = True, "stop"
        if self._drops_answers:
            delta.pieces, delta.finish_reason = [], delta.finish_reason and "length"
        if is_first and (echoed := self.body.echoed) is not None:
            ids = self.requests[index].prompt
            delta.pieces = prompt_pieces(self.tokenizer, ids, echoed[index], choice.prompt_scores) + delta.pieces
        return delta

    def _finish(self, index: int, event: Finished) -> Delta:
        if event.reason == "error":
            raise ApiError(500, event.message)
        if event.reason == "cancelled":
            raise ApiError(503, SERVER_STOPPED)
        choice = self.choices[index]
        pieces = choice.text.end()  # may find a stop string in text that was held back
        choice.ended = True
        reason: Literal["stop", "length"] = "stop" if choice.text.stopped else event.reason
        return Delta(index, pieces, None, reason, event.timings)
