"""Answers to requests that are known from the start: those of `generate`, files of prompts, regenerated text; and to
those of a conversation, one after another."""

import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from longspec.errors import UserError
from longspec.inference.device import free_bytes
from longspec.inference.engine.prefill import PREFILL_TOKENS
from longspec.inference.engine.request_engine import EngineSettings, RequestEngine
from longspec.inference.engine.requests import Event, Finished, Request, RequestTooLarge, Ticket, Tokens
from longspec.inference.memory import slot_bytes
from longspec.inference.methods import Drafting
from longspec.inference.sampling import SamplingKind, sampling_kind
from longspec.inference.stats import GenerationStats, pool
from longspec.models.glide import GlideMixin
from longspec.models.target_files import position_limit

REFILLED = 8
"""Idle rows get the next requests once they are one in REFILLED of all rows."""


@dataclass(frozen=True)
class Listener:
    """What becomes of the answers. Requests are known by their numbers. An exception ends all of them."""

    take: Callable[[int, Tokens], int | None]
    """Called with the next tokens of an answer; returns how many of them it keeps if it ends there, else None."""
    finish: Callable[[int, GenerationStats], object] = lambda number, stats: None
    """Called once an answer is complete, with its own counts and times. `decode_s` is its share of the rounds' time;
    the times of the setup go to the first answer."""
    is_stopped: Callable[[], bool] = lambda: False
    """Whether the requests that have not started are to be left out."""
    in_blocks: bool = False
    """As in `EngineSettings`. Then no answer ends by `take`."""


def whole_answers(
    finish: Callable[[int, list[int], GenerationStats], object], is_stopped: Callable[[], bool] = lambda: False
) -> Listener:
    """A listener that calls `finish` with the number, the tokens and the figures of each complete answer."""
    answers: defaultdict[int, list[int]] = defaultdict(list)

    def take(number: int, event: Tokens) -> None:
        answers[number] += event.ids

    return Listener(take, lambda number, stats: finish(number, answers.pop(number), stats), is_stopped, in_blocks=True)


def answer_all(
    model: GlideMixin,
    drafting: Drafting,
    requests: Sequence[Request],
    max_rows: int | None,
    listener: Listener,
    attention: str = "auto",
    compile: bool = True,
    window: int | None = None,
    longest: int = 0,
) -> GenerationStats:
    """Answer requests, `max_rows` at a time or as many as fit into memory. A row that ends goes to the next request.
    max_rows: None answers all as one batch, whose prompts are read before the first round; else all rows have room for
    the longest request. drafting: checked settings. window: number of successive requests of which the longest starts
    first; None for all. longest: tokens that a row has room for at least; calls with equal room share kernels and the
    idle batch. Returns the counts and times of all; `ttft_s` is then the time of prefill. Raises UserError, with the
    number of the request, for one that cannot be answered."""
    if not requests or listener.is_stopped():
        return GenerationStats()
    start, together, order = time.perf_counter(), max_rows is None, list(range(len(requests)))
    if not together:
        # The longest first, so that no long answer runs alone at the end.
        window = window or len(requests)
        order.sort(key=lambda number: (number // window, -requests[number].longest))
    rows = min(max_rows or len(requests), len(requests))
    settings = EngineSettings(
        drafting,
        rows,
        longest=max(longest, *(request.longest for request in requests)),
        prefill_chunk=PREFILL_TOKENS,
        attention=attention,
        compile=compile,
        kind=sampling_kind([request.sampling for request in requests]),
        refill=1 if together else max(1, rows // REFILLED),
        together=together,
        in_blocks=listener.in_blocks,
    )
    run = _Run(RequestEngine(model, settings), requests, listener, "row" if together else "prompt")
    return run.play(order, start)


class Conversation:
    """Answers requests one after another on one row, whose keys and values stay: a prompt that begins as the text of
    the request before is read from the first other token on. The row's engine has room for about twice the request
    that it was built for; a longer one gets a new engine, which reads its whole prompt. To be closed."""

    def __init__(self, model: GlideMixin, drafting: Drafting, attention: str) -> None:
        """drafting: checked settings. attention: as for `longspec.generate`."""
        self.model, self.drafting, self.attention = model, drafting, attention
        self.engine: RequestEngine | None = None

    def answer(self, request: Request, take: Callable[[int, Tokens], int | None]) -> GenerationStats:
        """The counts and times of an answer. take: see `Listener`; an exception or KeyboardInterrupt that it raises
        ends the request and is raised again. The tokens are those of `longspec.generate`. Raises UserError."""
        start, kind = time.perf_counter(), sampling_kind([request.sampling])
        engine = self.engine
        if engine is None or engine.is_closed or engine.longest < request.longest or engine.settings.kind != kind:
            del engine
            engine = self._open(request, kind)
        else:
            engine.restart()
        return _Run(engine, [request], Listener(take), "prompt", stays_open=True).play([0], start)

    def _open(self, request: Request, kind: SamplingKind) -> RequestEngine:
        """An engine with room for the request, for twice as much if half of the free memory holds it."""
        self.close()
        if self.model.device.type == "cuda":
            torch.cuda.empty_cache()
        config = self.model.config
        affordable = free_bytes(self.model.device) // 2 // slot_bytes(config, self.model.dtype)
        longest = max(request.longest, min(2 * request.longest, position_limit(config), affordable))
        settings = EngineSettings(self.drafting, 1, longest=longest, attention=self.attention, kind=kind, together=True)
        self.engine = RequestEngine(self.model, settings)
        return self.engine

    def close(self) -> None:
        """Free the row, and let the other ranks that share the target go on."""
        if self.engine is not None:
            self.engine.close()
            self.engine = None


@dataclass
class _Run:
    """The requests of one engine."""

    engine: RequestEngine
    requests: Sequence[Request]
    listener: Listener
    word: str
    """What error messages call a request."""
    tickets: dict[int, Ticket] = field(default_factory=dict)
    """Those of the answers that are not complete."""
    failures: list[BaseException] = field(default_factory=list)
    """The exception that ended the run, if any. It is taken out to be raised, as its traceback holds the engine."""
    build_s: float = 0.0
    stays_open: bool = False
    """Whether the engine is to be restarted for later requests. It is closed if it fails."""

    def __post_init__(self) -> None:
        drafting, nodes = self.engine.settings.drafting, self.engine.batch.nodes
        tree = tuple(drafting.tree_shape), nodes if drafting.method == "tree" else 0
        self.figures = [GenerationStats(tree_shape=tree[0], tree_nodes=tree[1]) for _ in self.requests]
        self.reported = {"build_s": 0.0, **self.engine.batch.setup}
        """The times of the setup that are part of an answer's figures, and those before this run."""

    def play(self, order: Sequence[int], start: float) -> GenerationStats:
        """Step until all requests have ended. start: time.perf_counter() before the engine was built."""
        engine, device = self.engine, self.engine.batch.device
        self.build_s = time.perf_counter() - start
        try:
            self.tickets = {number: self._add(number) for number in order}
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            if self.stays_open or any(request.max_new_tokens > 1 for request in self.requests):
                engine.prepare()
            before, prepared = time.perf_counter(), engine.batch.seconds_of_setup
            while engine.step():
                if self.failures or (engine.waiting and self.listener.is_stopped()):
                    for ticket in self.tickets.values() if self.failures else engine.waiting:
                        engine.cancel(ticket)
            # A capture takes no part in the rounds' time.
            seconds = time.perf_counter() - before - (engine.batch.seconds_of_setup - prepared)
        except BaseException:
            engine.close()
            raise
        finally:
            del self.engine  # the tickets know this object, and the engine its tickets
        if not self.stays_open:
            engine.close(keeps=not self.failures and not self.tickets)
        if self.failures:
            raise self.failures.pop()
        stats, prefill_s = pool(self.figures), engine.worker.counts.prefill_s
        plans = {} if engine.worker.controller is None else engine.worker.controller.played
        stats.rounds_by_plan = {plan.name: count for plan, count in plans.items()}
        stats.ttft_s, stats.decode_s = prefill_s, seconds - prefill_s
        stats.row_rounds = [own.rounds for own in self.figures]
        return stats

    def _add(self, number: int) -> Ticket:
        try:
            return self.engine.add(self.requests[number], partial(self._take, number))
        except RequestTooLarge as error:
            raise UserError(f"{self.word} {number}: {error}") from error

    def _take(self, number: int, event: Event) -> None:
        if number not in self.tickets or self.failures:
            return  # the answer has ended, and the engine learns of it a round late
        try:
            if isinstance(event, Tokens):
                self._take_tokens(number, event)
            elif isinstance(event, Finished):
                if event.reason == "error":
                    raise UserError(f"{self.word} {number}, {event.message}")
                if event.reason != "cancelled":
                    self._end(number)
        except (Exception, KeyboardInterrupt) as error:  # it is the caller's
            self.failures.append(error)

    def _take_tokens(self, number: int, event: Tokens) -> None:
        kept, own, ticket = self.listener.take(number, event), self.figures[number], self.tickets[number]
        count = len(event.ids) if kept is None else kept
        if not own.row_rounds:
            # Prefill chooses the first token.
            own.ttft_s = ticket.first_token - ticket.started - ticket.setup_s
            own.row_rounds, own.accepted_by_depth = [0], [0] * self.engine.batch.depth
        else:
            # A round ends with the target's own token, unless the answer ends before it.
            own.rounds += max(1, event.origins.count("target"))
            own.decoded_tokens += count
            for depth in range(count - event.origins[:count].count("target")):
                own.accepted_by_depth[depth] += 1
        if kept is not None:
            self.engine.cancel(ticket)
            self._end(number)

    def _end(self, number: int) -> None:
        ticket, own, batch = self.tickets.pop(number), self.figures[number], self.engine.batch
        own.decode_s, own.rounds_by_plan = ticket.round_s, dict(ticket.plans)
        own.row_rounds = [own.rounds]
        if batch.device.type == "cuda":
            # `max_memory_allocated` flattens and sorts all statistics, which takes longer than the rest of this.
            stats = torch.cuda.memory_stats_as_nested_dict(batch.device)
            own.peak_memory_bytes = stats["allocated_bytes"]["all"]["peak"]
        setup = {"build_s": self.build_s, **batch.setup}
        for name, seconds in setup.items():
            setattr(own, name, seconds - self.reported[name])
        self.reported = setup
        self.listener.finish(number, own)
