"""Answers to requests that are known from the start: those of `generate`, files of prompts, regenerated text."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from longspec.errors import UserError
from longspec.inference.engine.prefill import PREFILL_TOKENS
from longspec.inference.engine.request_engine import EngineSettings, RequestEngine
from longspec.inference.engine.requests import Event, Finished, Request, Ticket, Tokens
from longspec.inference.methods import Drafting
from longspec.inference.sampling import sampling_kind
from longspec.inference.stats import GenerationStats, pool
from longspec.models.glide import GlideMixin

REFILLED = 8
"""Idle rows get the next requests once they are one in REFILLED of all rows."""


@dataclass(frozen=True)
class Listener:
    """What becomes of the answers. Requests are known by their numbers. An exception ends all of them."""

    take: Callable[[int, Tokens], int | None]
    """Called with the next tokens of an answer. Returns how many of them the answer keeps if it ends there, else None.
    """
    finish: Callable[[int], object] = lambda number: None
    """Called once an answer is complete."""
    is_stopped: Callable[[], bool] = lambda: False
    """Whether the requests that have not started are to be left out."""


def answer_together(
    model: GlideMixin,
    drafting: Drafting,
    requests: Sequence[Request],
    listener: Listener,
    attention: str = "auto",
    compile: bool = True,
) -> GenerationStats:
    """Answer requests as one batch: their prompts are read before the first round.

    drafting: checked settings; the requests are checked, too. attention, compile: as for `longspec.generate`. Returns
    the counts and times. Raises UserError, with the number of the row, for logits that are NaN or infinite.
    """
    start = time.perf_counter()
    longest = max(request.longest for request in requests)
    kinds = (sampling_kind([request.sampling for request in requests]),)
    settings = EngineSettings(drafting, len(requests), None, longest, PREFILL_TOKENS, attention, compile, kinds, False)
    engine = RequestEngine(model, replace(settings, together=True))
    return _Run(engine, requests, range(len(requests)), listener, _Rows(len(requests)), "row").play(start)


def answer_all(
    model: GlideMixin,
    drafting: Drafting,
    requests: Sequence[Request],
    max_rows: int,
    listener: Listener,
    attention: str = "auto",
    compile: bool = True,
    window: int | None = None,
) -> GenerationStats:
    """Answer requests, `max_rows` at a time or as many as fit into memory. A row that ends goes to the next request.

    drafting: checked settings. attention, compile: as for `longspec.generate`. window: number of successive requests of
    which the longest starts first; None for all. The tokens of a request that is greedy or has a seed do not depend on
    the others. Returns the counts and times of all requests; prompts are read between rounds, and `ttft_s` is the time
    of this. Raises UserError, with the number of the request, for one that cannot be answered, such as one whose logits
    are NaN.
    """
    # The longest first, so that no long answer runs alone at the end.
    window = window or len(requests)
    waiting = sorted(range(len(requests)), key=lambda number: (number // window, -requests[number].longest))
    kinds = (sampling_kind([request.sampling for request in requests]),)
    figures, stats = _Rows(len(requests)), [GenerationStats()]
    while waiting and not listener.is_stopped():
        start = time.perf_counter()
        rows, longest = min(max_rows, len(waiting)), max(requests[number].longest for number in waiting)
        settings = EngineSettings(drafting, rows, None, longest, PREFILL_TOKENS, attention, compile, kinds, False)
        engine = RequestEngine(model, replace(settings, refill=max(1, rows // REFILLED)))
        # All rows have the capacity of the longest request. If memory is short, shorter ones come with more rows.
        shortest = 0 if engine.batch.max_rows == rows else longest // 2
        own = [number for number in waiting if requests[number].longest >= shortest]
        waiting = [number for number in waiting if requests[number].longest < shortest]
        stats.append(_Run(engine, requests, own, listener, figures, "prompt").play(start))
        del engine
        gc.collect()  # its memory is free for the next one
    shape, nodes = stats[-1].tree_shape, stats[-1].tree_nodes
    pooled = replace(pool(stats), tree_shape=shape, tree_nodes=nodes)
    return replace(pooled, row_rounds=figures.rounds, row_ttft_s=figures.ttft_s)


class _Rows:
    """The figures of each request, by number."""

    def __init__(self, count: int) -> None:
        self.rounds = [0] * count
        self.ttft_s = [0.0] * count


class _Run:
    """The requests of one engine."""

    def __init__(
        self,
        engine: RequestEngine,
        requests: Sequence[Request],
        own: Sequence[int],
        listener: Listener,
        rows: _Rows,
        word: str,
    ) -> None:
        """own: the numbers of those of the requests that this engine answers, in order. rows: takes the figures of each
        of them. word: for a request."""
        self.engine = engine
        self.own = own
        self.requests = requests
        self.listener = listener
        self.word = word
        self.tickets: dict[int, Ticket] = {}
        """Those of the answers that are not complete."""
        self.started: set[int] = set()
        """The requests whose first token has come."""
        self.failure: Exception | None = None
        self.rows = rows
        self.decoded_tokens = 0
        self.accepted_by_depth = [0] * engine.batch.depth

    def play(self, start: float) -> GenerationStats:
        """Step until all requests have ended. start: time.perf_counter() before the engine was built."""
        engine, device = self.engine, self.engine.batch.device
        build_s, setup = time.perf_counter() - start, engine.batch.setup.copy()
        try:
            for number in self.own:
                self.tickets[number] = engine.add(self.requests[number], partial(self._take, number))
            # Each kind of round is captured when it is first played, unless all rounds are of one kind.
            if any(self.requests[number].max_new_tokens > 1 for number in self.own):
                engine.prepare(captures=engine.settings.together)
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(device)
            before, prepared = time.perf_counter(), engine.batch.seconds_of_setup
            while engine.step() and self.failure is None:
                if engine.waiting and self.listener.is_stopped():
                    for ticket in engine.waiting:
                        engine.cancel(ticket)
            # A capture takes no part in the rounds' time.
            seconds = time.perf_counter() - before - (engine.batch.seconds_of_setup - prepared)
            if self.failure is not None:
                raise self.failure
        except BaseException:
            engine.close()
            raise
        engine.close(keeps=not self.tickets)
        stats = self._stats(seconds, build_s, setup)
        del self.engine  # the tickets know this object, and the engine its tickets
        return stats

    def _take(self, number: int, event: Event) -> None:
        if number not in self.tickets or self.failure is not None:
            return  # the answer has ended, and the engine learns of it a round late
        try:
            if isinstance(event, Tokens):
                self._take_tokens(number, event)
            elif isinstance(event, Finished):
                if event.reason == "error":
                    raise UserError(f"{self.word} {number}, {event.message}")
                if event.reason != "cancelled":
                    self._end(number)
        except Exception as error:  # it is the caller's
            self.failure = error

    def _take_tokens(self, number: int, event: Tokens) -> None:
        kept = self.listener.take(number, event)
        count = len(event.ids) if kept is None else kept
        if number not in self.started:
            self.started.add(number)
            self.rows.ttft_s[number] = time.perf_counter() - self.tickets[number].started
            count -= 1  # prefill chooses the first token
        else:
            self.rows.rounds[number] += 1
            for depth in range(sum(origin != "target" for origin in event.origins[:count])):
                self.accepted_by_depth[depth] += 1
        self.decoded_tokens += count
        if kept is not None:
            self.engine.cancel(self.tickets[number])
            self._end(number)

    def _end(self, number: int) -> None:
        del self.tickets[number]
        self.listener.finish(number)

    def _stats(self, seconds: float, build_s: float, setup: dict[str, float]) -> GenerationStats:
        """seconds: those of prefill and rounds. setup: `Batch.setup` before."""
        batch, worker, drafting = self.engine.batch, self.engine.worker, self.engine.settings.drafting
        plans = {} if worker.controller is None else worker.controller.played
        is_cuda = batch.device.type == "cuda"
        return GenerationStats(
            rounds=sum(self.rows.rounds[number] for number in self.own),
            row_rounds=self.rows.rounds,
            row_ttft_s=self.rows.ttft_s,
            decoded_tokens=self.decoded_tokens,
            accepted_by_depth=self.accepted_by_depth,
            ttft_s=worker.counts.prefill_s,
            decode_s=seconds - worker.counts.prefill_s,
            peak_memory_bytes=torch.cuda.max_memory_allocated(batch.device) if is_cuda else 0,
            tree_shape=tuple(drafting.tree_shape),
            tree_nodes=batch.nodes if drafting.method == "tree" else 0,
            rounds_by_plan={plan.name: count for plan, count in plans.items()},
            build_s=build_s,
            **{name: total - setup[name] for name, total in batch.setup.items()},
        )
