"""The engine's loop: prompts, rounds, and the events that they cause."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

import numpy as np

from longspec.inference.adaptive.controller import Controller
from longspec.inference.adaptive.plans import Plan
from longspec.inference.cache import fault_message
from longspec.inference.engine.backlog import Backlog
from longspec.inference.engine.batch import Batch
from longspec.inference.engine.intake import LEAST_SHARED, Intake, Outcome
from longspec.inference.engine.requests import (
    Counts,
    Event,
    Finished,
    FinishReason,
    Origin,
    Ticket,
    Timings,
    Tokens,
    Tree,
    round_origins,
)
from longspec.inference.engine.roster import Roster
from longspec.inference.engine.round_record import Flight, RowRound, TokenScore
from longspec.inference.engine.rows import Row, Rows

logger = logging.getLogger(__name__)


class Launch(NamedTuple):
    """A round that was launched and whose result the host has not read."""

    roster: Roster
    """The rows that it advances."""
    flight: Flight
    plan: Plan | None
    """For method "auto"."""


class Worker:
    """All of it runs on one thread. Events of a round wait in an outbox until the next round is launched.

    Where rounds are CUDA graphs, a round is launched before the result of the one before is read, so that the device
    never waits for the host. A request that has ended can thus take part in one more round, whose result is dropped.
    """

    def __init__(self, batch: Batch, prefill_chunk: int | None, refill: int = 1, in_blocks: bool = False) -> None:
        """prefill_chunk: most prompt tokens that are read between two rounds; None for requests that start together,
        each on a row of its own. refill, in_blocks: see `EngineSettings`."""
        self.batch = batch
        self.in_blocks = in_blocks and batch.depth == 0 and not batch.details
        self.backlog = Backlog(batch.max_rows)
        least = LEAST_SHARED if refill > 1 else 1
        self.rows = Rows(batch.max_rows, None if prefill_chunk is None else least)
        self.counts = Counts()
        self.outbox: list[tuple[Ticket, Event]] = []
        self.ahead = 1 if batch.runner.capturable else 0
        """Rounds that are launched before the result of the oldest one is read."""
        self._launches: deque[Launch] = deque()
        self._since = 0.0
        """time.perf_counter() from which on the time of rounds is not shared out."""
        self._ended: list[Row] = []
        """Rows whose requests have ended, but which the batch has not taken out of the rounds."""
        self._roster: Roster | None = None
        """That of the next round; None if a row has started, ended or moved."""
        self.has_unwanted = False
        """Whether a request was cancelled, or its client has failed."""
        self.controller: Controller | None = None
        """Chooses the plans of method "auto"."""
        if batch.plans:
            self.controller = Controller(batch.plans, batch.times, batch.times.refill)
        self.intake = Intake(batch, self.rows, self.counts, self.outbox, prefill_chunk, self.controller, refill)

    def step(self, waiting: deque[Ticket], deliver: Callable[[], None]) -> None:
        """Read one chunk of prompts, then play one round.

        waiting: requests without a row, which get the next idle ones. deliver: sends the outbox, before the round if a
        prompt ended, and while the device works on the round.
        """
        if self.has_unwanted:
            self.has_unwanted = False
            self._end_unwanted(waiting)
        self._take_out()
        events = len(self.outbox)
        start = time.perf_counter()
        if self.intake.refill > 1 and self.intake.is_due() and min(len(waiting), len(self.rows.idle)) > 1:
            running = self.rows.running()
            self._move_together(running, len(running))  # idle rows next to each other are read in one pass
        for outcomes in self.intake.read(waiting):
            for outcome in outcomes:
                self._begin(outcome)
            self._take_out()
        prefill_s = time.perf_counter() - start
        self.counts.prefill_s += prefill_s
        self._since += prefill_s
        if len(self.outbox) > events:
            deliver()  # the device is idle meanwhile, but a first token would otherwise arrive later
        roster = self._roster = self._roster or self._new_roster()
        # A round emits a token or more in each running row.
        is_needed = bool((self.backlog.left[roster.indices] > len(self._launches)).any())
        if is_needed:
            if not self._launches:
                self._since = time.perf_counter()
            setup = self.batch.seconds_of_setup
            self._launches.append(self._launch(roster))
            self._since += self.batch.seconds_of_setup - setup
        # The host has time until the round ends: clients get the tokens that were read last.
        deliver()
        if self.controller is not None:
            self.controller.think()
        while len(self._launches) > (self.ahead if is_needed else 0):
            self._note(self._launches.popleft())
        self._take_out()
        if not self.ahead or self.intake.reads_all or self.rows.all_idle:
            deliver()

    def wait(self) -> None:
        """Wait for the rounds in flight, whose rows have all ended."""
        while self._launches:
            self._launches.popleft().flight.lines()

    def end_all(self, reason: FinishReason, message: str) -> None:
        """End every request that has a row, without touching the device."""
        for row in self.rows.busy():
            self._finish(row, reason, message)

    def refuse(self, ticket: Ticket, reason: FinishReason, message: str = "") -> None:
        """End a request that has no row."""
        self.counts.finished[reason] += 1
        self.outbox.append((ticket, Finished(reason, message, Timings(queue_s=time.perf_counter() - ticket.submitted))))

    def _end_unwanted(self, waiting: deque[Ticket]) -> None:
        """End the requests that were cancelled, or whose clients have failed."""
        # Clients that have gone must not hold places in the queue.
        # A copy, because the scheduler's clients add requests meanwhile.
        for ticket in [ticket for ticket in list(waiting) if ticket.cancelled]:
            waiting.remove(ticket)
            self.refuse(ticket, "cancelled")
        held = self.intake.held
        if held is not None and held.cancelled:
            self.intake.held = None
            self.refuse(held, "cancelled")
        for row in self.rows.busy():
            assert row.job is not None
            ticket = row.job.ticket
            if ticket.cancelled or ticket.failure:
                self._stop(row, "error" if ticket.failure else "cancelled", ticket.failure)

    def _begin(self, outcome: Outcome) -> None:
        """Take a row whose prompt was read into the rounds, or end its request."""
        row, job = outcome.row, outcome.row.job
        assert job is not None
        if outcome.failure:
            self._stop(row, "error", outcome.failure)
            return
        job.root = outcome.root
        job.first_token = job.last_token = time.perf_counter()
        row.window_is_stale = False
        self._roster = None
        if self.in_blocks:
            self.backlog.start(row.index, job.ticket.request.stop_ids)
        if self.controller is not None and job.trace is not None:
            self.controller.start(job.ticket, job.trace, job.root)
        if outcome.fault:
            self._stop_faulty(row, outcome.fault)
        else:
            scores = None if outcome.scores is None else [outcome.scores]
            self._emit(row, RowRound([job.root], logprobs=[outcome.logprob]), scores=scores)

    def _new_roster(self) -> Roster:
        """The running rows, after moving them together if that makes their rounds smaller."""
        batch, running = self.batch, self.rows.running()
        if running:
            # Rounds run over the first rows, so one running row with a high number would make them as large as the
            # batch.
            self._move_together(running, batch.size_for(len(running)))
        return Roster.of(running, batch)

    def _launch(self, roster: Roster) -> Launch:
        """Launch a round of the running rows."""
        self.counts.rounds += 1
        self.batch.times.size = roster.size
        mode = roster.mode
        if mode.speculates:
            mode = mode._replace(plan=self._choose_plan(roster.rows))
        result = self.batch.play(mode, roster.size)
        return Launch(roster, Flight(result, mode.report, roster.traced), mode.plan)

    def _choose_plan(self, running: list[Row]) -> Plan | None:
        """The plan of a round of method "auto"; None for other methods.

        The answer to a request with a seed must not depend on the other requests. Above temperature 0 the plan decides
        which random numbers an answer takes, so one plan is played as long as such a request runs, unless all requests
        start together.
        """
        if self.controller is None:
            return None
        requests = [row.job.ticket.request for row in running if row.job is not None]
        is_seeded = any(request.sampling.seed is not None and not request.sampling.greedy for request in requests)
        if is_seeded and not self.intake.reads_all:
            plan = self.controller.impose(self.batch.plans[-1])
        else:
            plan = self.controller.choose()
        stale = [row.number for row in running if row.window_is_stale]
        if plan.feeds_draft and stale:
            self.batch.refill_draft(stale)
        for row in running:
            row.window_is_stale = not plan.feeds_draft
        return plan

    def _move_together(self, running: list[Row], size: int) -> None:
        """Move the running rows to numbers below `size`, each with the first row that does not run."""
        used = {row.number for row in running}
        moved = [row for row in reversed(running) if row.number >= size]
        unused = (self.rows[number] for number in range(size) if number not in used)
        pairs = list(zip(moved, unused, strict=False))
        if not pairs:
            return
        self._roster = None
        for row in moved:
            self._flush(row)
        # Rounds in flight may have stored tokens that the host does not know.
        unread = len(self._launches) * (self.batch.depth + 1)
        longest = max(len(row.tokens) for pair in pairs for row in pair)
        self.batch.move([row.number for row, _ in pairs], [free.number for _, free in pairs], longest + unread)
        for row, free in pairs:
            self.rows.swap(row, free)

    def _note(self, launch: Launch) -> None:
        """Process a round's result. Reading it waits for the round."""
        flight, roster = launch.flight, launch.roster
        lines, traces, scores = flight.lines(), flight.traces(), flight.scores()
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        parts: dict[Hashable, RowRound] = {}
        live = np.arange(len(roster.rows))
        if roster is not self._roster:  # else no request ended while the round was in flight
            live = np.array([row.last_used for row in roster.rows]) == roster.last_used
            live = live.nonzero()[0]
        share = seconds / max(1, len(live))
        if self.in_blocks:
            live = self._add_to_backlog(roster, live, lines, share)
        for position, line in zip(live.tolist(), lines[roster.numbers[live]].tolist(), strict=True):
            row, number = roster.rows[position], roster.numbers[position]
            played = RowRound.read(line, flight.width, flight.report)
            if played.fault:
                self._stop_faulty(row, played.fault)
                continue
            job = row.job
            assert job is not None
            new_tokens = played.tokens
            job.rounds += 1
            self._store(row, new_tokens, now, share)
            request = job.ticket.request
            if launch.plan is not None:
                job.ticket.plans[launch.plan.name] += 1
            tree = None
            if traces is not None and request.trace:
                tree = _tree(traces[number], flight.width, round_origins(played.from_lookup)[:-1])
            taken = self._emit(row, played, tree, None if scores is None else scores[number])
            if job.trace is not None:
                parts[job.ticket] = played._replace(tokens=new_tokens[:taken])
            if request.speculate:
                self.counts.row_rounds += 1
                self.counts.decoded_tokens += taken
                self.counts.accepted_tokens += min(taken, len(new_tokens) - 1)
        if self.controller is not None and launch.plan is not None:
            self.controller.observe(parts)

    def _add_to_backlog(self, roster: Roster, live: np.ndarray, lines: np.ndarray, share: float) -> np.ndarray:
        """Keep the tokens of those rows in which nothing happens; the positions of the others. live: positions."""
        own = lines[roster.numbers[live]]
        ends = live[self.backlog.add(roster.indices[live], own[:, 2], own[:, 1], share)]
        for row in roster.rows if self.backlog.is_full else [roster.rows[position] for position in ends]:
            self._flush(row)
        if self.backlog.is_full:
            self.backlog.clear()
        return ends

    def _flush(self, row: Row) -> None:
        """Send the tokens of a row that wait."""
        if not self.in_blocks:
            return
        tokens, seconds = self.backlog.take(row.index)
        if tokens:
            job, count = row.job, len(tokens)
            assert job is not None
            job.rounds += count
            job.new_tokens += count
            self._store(row, tokens, time.perf_counter(), seconds)
            self.counts.new_tokens += count
            self.counts.row_rounds += count
            self.counts.decoded_tokens += count
            self.outbox.append((job.ticket, Tokens(tokens, ["target"] * count)))

    def _store(self, row: Row, new_tokens: Sequence[int], now: float, seconds: float) -> None:
        """Note the new tokens of a row, which its cache holds up to the last one. seconds: its share of the time."""
        job = row.job
        assert job is not None and job.root is not None
        # The cache now holds the old root and all new tokens but the last, which is the next root.
        row.tokens.append(job.root)
        row.tokens.extend(new_tokens[:-1])
        job.root = new_tokens[-1]
        job.last_token = now
        job.ticket.round_s += seconds

    def _emit(
        self, row: Row, played: RowRound, tree: Tree | None = None, scores: list[list[float]] | None = None
    ) -> int:
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
        self.backlog.left[row.index] = request.max_new_tokens - job.new_tokens
        self.counts.new_tokens += taken
        logprobs = list(played.logprobs[:taken]) if request.logprobs else None
        alternatives = None
        if scores is not None and request.alternatives:
            found = [TokenScore.read(line, request.alternatives) for line in scores[:taken]]
            logprobs, alternatives = [score.logprob for score in found], [score.alternatives for score in found]
        self.outbox.append((job.ticket, Tokens(list(ids[:taken]), origins[:taken], logprobs, tree, alternatives)))
        if reason is not None:
            self._stop(row, reason)
        return taken

    def _stop_faulty(self, row: Row, fault: int) -> None:
        assert row.job is not None
        # The logits of a token come from the position before it.
        position = len(row.job.prompt) + row.job.new_tokens - 1
        temperature = row.job.ticket.request.sampling.temperature
        self.intake.forget(row)
        self._stop(row, "error", fault_message(fault, position, temperature))

    def _stop(self, row: Row, reason: FinishReason, message: str = "") -> None:
        """End a row's request and keep what the cache holds of it."""
        self._ended.append(row)
        self._finish(row, reason, message)

    def _take_out(self) -> None:
        """Take the rows that have ended out of the rounds. No other request may have got them."""
        if self._ended:
            self.batch.end([row.number for row in self._ended], [len(row.tokens) for row in self._ended])
            self._ended.clear()

    def _finish(self, row: Row, reason: FinishReason, message: str = "") -> None:
        job = row.job
        assert job is not None
        self._flush(row)
        self._roster = None
        self.intake.drop(row)
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
