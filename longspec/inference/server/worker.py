"""The engine thread's work: admission, prefill in chunks, rounds, and the events that they cause."""

from __future__ import annotations

import logging
import secrets
import time
from array import array
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from longspec.errors import first_line
from longspec.inference.adaptive.controller import Controller
from longspec.inference.adaptive.plans import Plan
from longspec.inference.cache import fault_message
from longspec.inference.origins import Origin, round_origins
from longspec.inference.prefill import joined_rows
from longspec.inference.round_record import Flight, RowRound
from longspec.inference.server.batch import KINDS, Batch, Mode, served_kind
from longspec.inference.server.requests import Event, Finished, FinishReason, Ticket, Timings, Tokens, Tree
from longspec.inference.server.rows import Counts, Row, Rows, Running, common_prefix

logger = logging.getLogger(__name__)


LEAST_SHARED = 64
"""Tokens of a prefix for which a request waits until another row has read them."""


class Launch(NamedTuple):
    """A round that was launched and whose result the host has not read."""

    rows: list[tuple[int, Row, int]]
    """The rows that it advances: `number` and `last_used` at the launch. The latter changes when the request ends."""
    flight: Flight
    plan: Plan | None
    """For method "auto"."""


class Worker:
    """All of it runs on one thread. Events of a round wait in an outbox until the next round is launched.

    Where rounds are CUDA graphs, a round is launched before the result of the one before is read, so that the device
    never waits for the host. A request that has ended can thus take part in one more round, whose result is dropped.
    """

    def __init__(self, batch: Batch, max_rows: int, prefill_chunk: int) -> None:
        """prefill_chunk: most prompt tokens that are read between two rounds."""
        self.batch = batch
        self.rows = Rows(max_rows)
        self.prefill_chunk = prefill_chunk
        self.counts = Counts()
        self.outbox: list[tuple[Ticket, Event]] = []
        self.ahead = 1 if batch.runner.capturable else 0
        """Rounds that are launched before the result of the oldest one is read."""
        self._launches: deque[Launch] = deque()
        self._reading: list[Row] = []
        """The rows whose prompts are read, in order of arrival."""
        self._held: Ticket | None = None
        """The next request, while another row reads a prefix of its prompt."""
        self._size = 1
        """Rows of the newest round."""
        self.controller: Controller | None = None
        """Chooses the plans of method "auto"."""
        if batch.plans:
            self.controller = Controller(batch.plans, lambda plan, read: batch.round_time(plan, read, self._size))

    def step(self, next_ticket: Callable[[], Ticket | None], deliver: Callable[[], None]) -> None:
        """Read one chunk of prompts, then play one round.

        `deliver` sends the outbox: before the round if a prompt ended, and while the device works on the round.
        """
        for row in self.rows.busy():
            self._end_if_unwanted(row)
        if self._held is not None and self._held.cancelled:
            self.refuse(self._held, "cancelled")
            self._held = None
        events = len(self.outbox)
        start = time.perf_counter()
        self._prefill(next_ticket)
        self.counts.prefill_s += time.perf_counter() - start
        if len(self.outbox) > events:
            deliver()  # the device is idle meanwhile, but a first token would otherwise arrive later
        running = self.rows.running()
        if running:
            self._launches.append(self._launch(running))
        # The host has time until the round ends: clients get the tokens that were read last.
        deliver()
        if self.controller is not None:
            self.controller.think()
        while len(self._launches) > (self.ahead if running else 0):
            self._note(self._launches.popleft())

    def end_all(self, reason: FinishReason, message: str) -> None:
        """End every request that has a row, without touching the device."""
        for row in self.rows.busy():
            self._finish(row, reason, message)

    def refuse(self, ticket: Ticket, reason: FinishReason, message: str = "") -> None:
        """End a request that has no row."""
        self.counts.finished[reason] += 1
        self.outbox.append((ticket, Finished(reason, message, Timings(queue_s=time.perf_counter() - ticket.submitted))))

    def _end_if_unwanted(self, row: Row) -> None:
        assert row.job is not None
        ticket = row.job.ticket
        if ticket.cancelled or ticket.failure:
            self._stop(row, "error" if ticket.failure else "cancelled", ticket.failure)

    def _prefill(self, next_ticket: Callable[[], Ticket | None]) -> None:
        budget = self.prefill_chunk
        while budget > 0:
            self._admit(next_ticket)
            if not self._reading:
                return
            rows = self._next_rows(budget)
            try:
                budget -= self._read(rows, budget)
            except Exception as error:  # a request's own failure; one of the device shows again in the next round
                logger.exception("prefill failed")
                for row in rows:
                    self._forget(row)
                    if len(rows) > 1 and row.job is not None:  # another try tells whose failure it is
                        row.job.reads_alone = True
                    else:
                        self._stop(row, "error", f"prefill failed: {first_line(error)}")

    def _admit(self, next_ticket: Callable[[], Ticket | None]) -> None:
        """Give rows to the next requests, as many as the next passes read."""
        while len(self.rows.busy()) < self.batch.max_rows:
            if sum(row.unread for row in self._reading) >= self.prefill_chunk:
                return
            ticket, self._held = self._held or next_ticket(), None
            if ticket is None:
                return
            prompt = np.array(ticket.request.prompt, dtype=np.int64)
            # Once the row that reads the same prefix has read it, it is copied.
            if any(common_prefix(prompt, row.job.prompt) >= LEAST_SHARED for row in self._reading if row.job):
                self._held = ticket
                return
            self._reading.append(self._give_row(ticket, prompt))

    def _give_row(self, ticket: Ticket, prompt: np.ndarray) -> Row:
        """Give a row to a request, and the prefix that some row shares with it."""
        request, batch = ticket.request, self.batch
        choice = self.rows.choose(prompt)
        assert choice is not None
        row, source, cached = choice
        # The longest common prefix may be in a row that is busy, so it is copied.
        if row is not source:
            batch.copy_prefix(source.number, row.number, cached)
        row.tokens = array("q", prompt[:cached].tobytes())
        batch.set_length(row.number, cached)
        # Every row has a seed, so that its random numbers do not depend on the other rows.
        seed = secrets.randbits(64) if request.sampling.seed is None else request.sampling.seed
        batch.assign(row.number, request.sampling, seed, request.speculate)
        row.job = Running(ticket, prompt, cached, time.perf_counter())
        if self.controller is not None and request.speculate:
            row.job.trace = self.controller.new_trace()
            row.job.trace.read(prompt[:cached])
        self.counts.prompt_tokens += len(request.prompt)
        self.counts.cached_prompt_tokens += cached
        return row

    def _next_rows(self, budget: int) -> list[Row]:
        """The rows of the next pass: the first one whose prompt is read, and rows next to it that are as far."""
        first = self._reading[0]
        start = len(first.tokens)
        if first.job is not None and first.job.reads_alone:
            return [first]
        equal = {row.number: row for row in self._reading if len(row.tokens) == start}
        groups = joined_rows([(number, equal[number].unread) for number in sorted(equal)], budget, gap=0)
        group = next(group for group in groups if group.start <= first.number < group.stop)
        return [equal[number] for number in range(group.start, group.stop)]

    def _read(self, rows: list[Row], budget: int) -> int:
        """Read on in the prompts of consecutive rows; the number of tokens read. After its last token a row takes part
        in rounds."""
        start = len(rows[0].tokens)
        end = start + min(max(row.unread for row in rows), max(1, budget // len(rows)))
        jobs = [row.job for row in rows if row.job is not None]
        chunks = [job.prompt[start:end] for job in jobs]
        self.batch.read_prompts(slice(rows[0].number, rows[-1].number + 1), chunks, start)
        for row, job, chunk in zip(rows, jobs, chunks, strict=True):
            row.tokens.frombytes(chunk.tobytes())
            if job.trace is not None:
                job.trace.read(chunk)
        complete = [number for number, row in enumerate(rows) if not row.unread]
        if complete:
            self._begin(rows, complete)
        return max(map(len, chunks)) * len(rows)

    def _begin(self, rows: list[Row], complete: list[int]) -> None:
        """Choose the first tokens of the rows whose prompts were read. complete: their places in `rows`."""
        batch, chosen = self.batch, []
        for part in joined_rows([(number, 1) for number in complete], len(rows), gap=0):
            jobs = [row.job for row in rows[part] if row.job is not None]
            kind = max((served_kind(job.ticket.request.sampling) for job in jobs), key=KINDS.index)
            numbers = slice(rows[part.start].number, rows[part.stop - 1].number + 1)
            chosen.append(batch.first_tokens(numbers, part, [job.prompt for job in jobs], kind))
        # One transfer for all that the host reads.
        for number, (token, logprob, fault) in zip(complete, torch.cat(chosen).tolist(), strict=True):
            row = rows[number]
            job = row.job
            assert job is not None
            self._reading.remove(row)
            job.root = int(token)
            job.first_token = job.last_token = time.perf_counter()
            row.ring_is_stale = False
            if self.controller is not None and job.trace is not None:
                self.controller.start(job.ticket, job.trace, job.root)
            if fault:
                self._stop_faulty(row, int(fault))
            else:
                self._emit(row, RowRound([job.root], logprobs=[logprob]))

    def _launch(self, running: list[Row]) -> Launch:
        """Launch a round of the running rows, after moving them together if that makes it smaller."""
        batch = self.batch
        # Rounds run over the first rows, so one running row with a high number would make them as large as the batch.
        size = batch.size_for(len(running))
        for row in sorted(running, key=lambda row: row.number, reverse=True):
            if batch.size_for(row.number + 1) > size:
                self._move_down(row)
        requests = [row.job.ticket.request for row in running if row.job is not None]
        kind = max((served_kind(request.sampling) for request in requests), key=KINDS.index)
        speculates = batch.depth > 0 and any(request.speculate for request in requests)
        self.counts.rounds += 1
        self._size = size = batch.size_for(max(row.number for row in running) + 1)
        plan = self._choose_plan(running) if speculates else None
        mode = Mode(speculates, kind, plan)
        result = batch.play(mode, size)
        traced = any(request.trace for request in requests)
        rows = [(row.number, row, row.last_used) for row in running]
        return Launch(rows, Flight(result, mode.report, traced), plan)

    def _choose_plan(self, running: list[Row]) -> Plan | None:
        """The plan of a round of method "auto"; None for other methods.

        The answer to a request with a seed must not depend on the other requests. Above temperature 0 the plan decides
        which random numbers an answer takes, so one plan is played as long as such a request runs.
        """
        if self.controller is None:
            return None
        requests = [row.job.ticket.request for row in running if row.job is not None]
        if any(request.sampling.seed is not None and request.sampling.temperature > 0 for request in requests):
            plan = self.controller.impose(self.batch.plans[-1])
        else:
            plan = self.controller.choose()
        for row in running:
            if plan.feeds_draft and row.ring_is_stale:
                self.batch.refill_draft(row.number)
            row.ring_is_stale = not plan.feeds_draft
        return plan

    def _move_down(self, row: Row) -> None:
        """Exchange a running row with the first one that does not run."""
        running = {other.number for other in self.rows.running()}
        free = self.rows[min(set(range(self.batch.max_rows)) - running)]
        # Rounds in flight may have stored tokens that the host does not know.
        unread = len(self._launches) * (self.batch.depth + 1)
        self.batch.move(row.number, free.number, max(len(row.tokens), len(free.tokens)) + unread)
        self.rows.swap(row, free)

    def _note(self, launch: Launch) -> None:
        """Process a round's result. Reading it waits for the round."""
        whole, traces = launch.flight.rows(), launch.flight.traces()
        parts: dict[Hashable, RowRound] = {}
        for number, row, last_used in launch.rows:
            if row.last_used != last_used:
                continue  # the request ended while the round was in flight
            played = whole[number]
            if played.fault:
                self._stop_faulty(row, played.fault)
                continue
            job = row.job
            assert job is not None and job.root is not None
            new_tokens = played.tokens
            # The cache now holds the old root and all new tokens but the last, which is the next root.
            row.tokens.append(job.root)
            row.tokens.extend(new_tokens[:-1])
            job.root = new_tokens[-1]
            job.rounds += 1
            job.last_token = time.perf_counter()
            request = job.ticket.request
            tree = None
            if traces is not None and request.trace:
                tree = _tree(traces[number], launch.flight.width, round_origins(played.from_lookup)[:-1])
            taken = self._emit(row, played, tree)
            if job.trace is not None:
                parts[job.ticket] = replace(played, tokens=new_tokens[:taken])
            if request.speculate:
                self.counts.row_rounds += 1
                self.counts.decoded_tokens += taken
                self.counts.accepted_tokens += min(taken, len(new_tokens) - 1)
        if self.controller is not None and launch.plan is not None:
            self.controller.observe(parts)

    def _emit(self, row: Row, played: RowRound, tree: Tree | None = None) -> int:
        """Send tokens up to the end of the answer; the number of them."""
        ids, origins = played.tokens, round_origins(played.from_lookup)
        job = row.job
        assert job is not None
        request = job.ticket.request
        # A round can go past a stop token and past the limit; the tokens after them are dropped.
        room = request.max_new_tokens - job.new_tokens
        taken = next((number for number, token in enumerate(ids, 1) if token in request.stop_ids), len(ids))
        reason: FinishReason | None = "stop" if ids[taken - 1] in request.stop_ids and taken <= room else None
        if reason is None and taken >= room:
            taken, reason = room, "length"
        job.new_tokens += taken
        self.counts.new_tokens += taken
        logprobs = list(played.logprobs[:taken]) if request.logprobs else None
        self.outbox.append((job.ticket, Tokens(list(ids[:taken]), origins[:taken], logprobs, tree)))
        if reason is not None:
            self._stop(row, reason)
        return taken

    def _stop_faulty(self, row: Row, fault: int) -> None:
        assert row.job is not None
        # The logits of a token come from the position before it.
        position = len(row.job.prompt) + row.job.new_tokens - 1
        temperature = row.job.ticket.request.sampling.temperature
        self._forget(row)
        self._stop(row, "error", fault_message(fault, position, temperature))

    def _forget(self, row: Row) -> None:
        """Drop what the cache holds of a row."""
        # Not to be offered as a prefix to a later request: NaN in it would spread.
        row.tokens = array("q")
        self.batch.set_length(row.number, 0)
        self.batch.clear(row.number)

    def _stop(self, row: Row, reason: FinishReason, message: str = "") -> None:
        """End a row's request and keep what the cache holds of it."""
        self.batch.end(row.number, len(row.tokens))
        self._finish(row, reason, message)

    def _finish(self, row: Row, reason: FinishReason, message: str = "") -> None:
        job = row.job
        assert job is not None
        if row in self._reading:
            self._reading.remove(row)
        self.counts.finished[reason] += 1
        self.outbox.append((job.ticket, Finished(reason, message, job.timings)))
        self.rows.release(row)
        if self.controller is not None:
            self.controller.end(job.ticket)


def _tree(trace: list[int], width: int, origins: list[Origin]) -> Tree:
    """The tree of a round in one row. trace: see `RoundResult.trace`; origins: one per accepted node."""
    nodes = (len(trace) - width) // 2
    path = trace[2 * nodes :]
    return Tree(trace[:nodes], trace[nodes : 2 * nodes], path[1 : len(origins) + 1], origins)
