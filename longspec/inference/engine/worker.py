"""The engine's loop: prompts, rounds, and the events that they cause."""

import time
from collections import deque
from collections.abc import Sequence

import numpy as np

from longspec.inference.adaptive.controller import Controller, Observed
from longspec.inference.adaptive.plans import Plan
from longspec.inference.adaptive.row_spread import RowSpread
from longspec.inference.cache import fault_message
from longspec.inference.engine.backlog import Backlog
from longspec.inference.engine.batch import Batch
from longspec.inference.engine.clients import Clients
from longspec.inference.engine.intake import Intake, Outcome
from longspec.inference.engine.requests import FinishReason, Tokens, Tree, round_origins
from longspec.inference.engine.round_record import Flight, RowRound, read_scores
from longspec.inference.engine.rows import Roster, Row, Rows


class Worker:
    """All of it runs on one thread.

    Where rounds are CUDA graphs, a round is launched before the result of the one before is read, so that the device
    never waits for the host. A request that has ended can thus take part in one more round, whose result is dropped.
    """

    def __init__(self, batch: Batch, rows: Rows, prefill_chunk: int | None, refill: int, in_blocks: bool) -> None:
        """rows: idle ones. prefill_chunk: most prompt tokens that are read between two rounds; None for requests that
        start together, each on a row of its own. refill, in_blocks: see `EngineSettings`."""
        self.batch, self.rows = batch, rows
        self.in_blocks = in_blocks and (batch.depth == 0 or bool(batch.plans)) and not batch.details
        self.backlog, self.clients = Backlog(batch.max_rows), Clients()
        self.counts = self.clients.counts
        self.ahead = 1 if batch.runner.capturable else 0
        """Rounds that are launched before the result of the oldest one is read."""
        self._launches: deque[tuple[Roster, Flight, Plan | None]] = deque()
        """Rounds in flight: the rows that each advances, its result, and its plan for method "auto"."""
        self._since = 0.0
        """time.perf_counter() from which on the time of rounds is not shared out."""
        self._ended: list[Row] = []
        """Rows whose requests have ended, but which the batch has not taken out of the rounds."""
        self._stale = np.zeros(batch.max_rows, dtype=bool)
        """By `Row.index`: whether the draft's window lacks tokens, because plans without the draft were played."""
        self._roster: Roster | None = None
        """That of the next round; None if a row has started, ended or moved."""
        times, spread = batch.times, RowSpread(self.backlog.left) if batch.pooled.is_whole else None
        self.controller = Controller(batch.plans, times, times.refill, batch.max_rows, spread) if batch.plans else None
        """Chooses the plans of method "auto"."""
        self.intake = Intake(batch, self.rows, self.clients, prefill_chunk, refill)

    def step(self) -> None:
        """Read one chunk of prompts, then play one round. Clients get events before the round if a prompt ended, and
        while the device works on the round."""
        if self.clients.has_unwanted:
            self.clients.has_unwanted = False
            self._end_unwanted()
        self._take_out()
        events = len(self.clients.waiting)
        start, setup = time.perf_counter(), self.batch.seconds_of_setup
        if self.intake.refill > 1 and self.intake.is_due() and min(len(self.intake.waiting), len(self.rows.idle)) > 1:
            running = self.rows.running()
            # Rows next to each other are read in one pass, also where the next requests take some of the idle ones.
            self._move_together(running, len(running))
            self.rows.sort_idle()
        for outcomes in self.intake.read():
            for outcome in outcomes:
                self._begin(outcome)
            self._take_out()
        seconds = time.perf_counter() - start
        self.counts.prefill_s += seconds - (self.batch.seconds_of_setup - setup)
        self._since += seconds
        if len(self.clients.waiting) > events and not self.in_blocks:
            self.clients.deliver()  # the device is idle meanwhile, but a first token would otherwise arrive later
        if self._roster is None:
            # Rounds run over the first rows, so one row with a high number would make them as large as the batch.
            running = self.rows.running()
            self._move_together(running, self.batch.size_for(len(running)))
            self._roster = Roster.of(running, self.batch)
        roster = self._roster
        # A round emits a token or more in each running row.
        is_needed = bool((self.backlog.left[roster.indices] > len(self._launches)).any())
        if is_needed:
            if not self._launches:
                self._since = time.perf_counter()
            setup = self.batch.seconds_of_setup
            self._launches.append(self._launch(roster))
            self._since += self.batch.seconds_of_setup - setup
        # The host has time until the round ends: clients get the tokens that were read last.
        self.clients.deliver()
        if self.controller is not None:
            self.controller.think()
        while len(self._launches) > (self.ahead if is_needed else 0):
            self._note(*self._launches.popleft())
        self._take_out()
        if not self.ahead or self.intake.reads_all or len(self.rows.idle) == self.batch.max_rows:
            self.clients.deliver()

    def wait(self) -> None:
        """Wait for the rounds in flight, whose rows have all ended."""
        while self._launches:
            self._launches.popleft()[1].lines()

    def end_all(self, reason: FinishReason, message: str) -> None:
        """End every request, without touching the device."""
        self.intake.waiting.clear()
        for row in self.rows.busy():
            self._stop(row, reason, message)
        self.clients.finish_open(reason, message)  # in the queue, or taken from it when the engine failed
        self.clients.deliver()

    def _end_unwanted(self) -> None:
        """End the requests that were cancelled, or whose clients have failed."""
        self.intake.drop_cancelled()
        for row in self.rows.busy():
            if reason := "error" if row.ticket.failure else row.ticket.cancelled:
                self._stop(row, reason, row.ticket.failure)

    def _begin(self, outcome: Outcome) -> None:
        """Take a row whose prompt was read into the rounds, or end its request."""
        row, played, ticket = outcome.row, outcome.played, outcome.row.ticket
        if outcome.failure:
            self._stop(row, "error", outcome.failure)
            return
        ticket.root = played.tokens[0]
        ticket.first_token = ticket.last_token = time.perf_counter()
        self._stale[row.index] = False
        self._roster = None
        if self.in_blocks:
            self.backlog.start(row.index, ticket.request.stop_ids)
        if self.controller is not None and ticket.request.speculate:
            self.controller.start(row.index, ticket.prompt, ticket.root, bool(ticket.request.stop_ids))
        if played.fault:
            self._stop_faulty(row, played.fault)
        else:
            self._emit(row, played, scores=outcome.scores)

    def _launch(self, roster: Roster) -> tuple[Roster, Flight, Plan | None]:
        """Launch a round of the running rows."""
        self.counts.rounds += 1
        size, mode = self.batch.size_of_next(roster.size), roster.mode
        self.batch.times.size = size
        if mode.speculates and self.controller is not None:
            mode = mode._replace(plan=self._choose_plan(self.controller, roster))
        result = self.batch.play(mode, size)
        return roster, Flight(result, mode.report, roster.traced), mode.plan

    def _choose_plan(self, controller: Controller, roster: Roster) -> Plan:
        """The plan of a round of method "auto". The answer to a request with a seed must not depend on the other
        requests. Above temperature 0 the plan decides which random numbers an answer takes, so one plan is played as
        long as such a request runs, unless all requests start together."""
        imposes = roster.draws and not self.intake.reads_all
        plan = controller.impose(self.batch.plans[-1]) if imposes else controller.choose()
        if plan.feeds_draft and len(stale := roster.numbers[self._stale[roster.indices]]):
            self.batch.refill_draft(stale.tolist())
        self._stale[roster.indices] = not plan.feeds_draft
        return plan

    def _move_together(self, running: list[Row], size: int) -> None:
        """Move the running rows to numbers below `size`, each with the first row that does not run."""
        used = {row.number for row in running}
        moved = [row for row in reversed(running) if row.number >= size]
        unused = (self.rows[number] for number in range(size) if number not in used)
        if not (pairs := list(zip(moved, unused, strict=False))):
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

    def _note(self, roster: Roster, flight: Flight, plan: Plan | None) -> None:
        """Process a round's result. Reading it waits for the round."""
        lines, scores = flight.lines(), flight.scores()
        now = time.perf_counter()
        seconds, self._since = now - self._since, now
        live = np.arange(len(roster.rows))
        if roster is not self._roster:  # else no request ended while the round was in flight
            live = np.flatnonzero(np.array([row.last_used for row in roster.rows]) == roster.last_used)
        share = seconds / max(1, len(live))
        counts, parts = np.zeros(len(roster.rows), dtype=np.int64), []
        if self.in_blocks and (plan is None or plan.kind == "vanilla"):
            counts[live] = lines[roster.numbers[live], 1] == 0  # one token, unless there is a fault
            live = self._add_to_backlog(roster, live, lines, share)
        elif not self.backlog.is_empty:
            self._empty_backlog(roster)
        for position, line in zip(live.tolist(), lines[roster.numbers[live]].tolist(), strict=True):
            row = roster.rows[position]
            played = RowRound.read(line, flight.width, flight.report)
            if played.fault:
                self._stop_faulty(row, played.fault)
                continue
            ticket, new_tokens = row.ticket, played.tokens
            self._store(row, new_tokens, 1, now, share)
            if plan is not None:
                ticket.plans[plan.name] += 1
            tree = flight.tree(roster.numbers[position], played) if ticket.request.trace else None
            taken = self._emit(row, played, tree, None if scores is None else scores[roster.numbers[position]])
            if ticket.request.speculate:
                counts[position] = taken
                parts.append(played)
                self.counts.row_rounds += 1
                self.counts.decoded_tokens += taken
                self.counts.accepted_tokens += min(taken, len(new_tokens) - 1)
        if self.controller is not None and plan is not None:
            tokens = lines[roster.numbers, 2 : 2 + flight.width]
            self.controller.observe(Observed(roster.indices, tokens, counts, parts))

    def _add_to_backlog(self, roster: Roster, live: np.ndarray, lines: np.ndarray, share: float) -> np.ndarray:
        """Keep the tokens of those rows in which nothing happens; the positions of the others. live: positions."""
        own = lines[roster.numbers[live]]
        ends = live[self.backlog.add(roster.indices[live], own[:, 2], own[:, 1], share)]
        for position in ends:
            self._flush(roster.rows[position])
        if self.backlog.is_full:
            self._empty_backlog(roster)
        return ends

    def _empty_backlog(self, roster: Roster) -> None:
        for row in roster.rows:
            self._flush(row)
        self.backlog.clear()

    def _flush(self, row: Row) -> None:
        """Send the tokens of a row that wait."""
        tokens, seconds = self.backlog.take(row.index)
        if count := len(tokens):
            self._store(row, tokens, count, time.perf_counter(), seconds)
            if self.batch.plans:
                row.ticket.plans[self.batch.plans[0].name] += count
            self.counts.row_rounds += count
            self.counts.decoded_tokens += count
            self.clients.send(row.ticket, Tokens(tokens, ["target"] * count))

    def _store(self, row: Row, new_tokens: Sequence[int], rounds: int, now: float, seconds: float) -> None:
        """Note the tokens of the newest rounds of a row, which its cache holds up to the last one. seconds: its share
        of their time."""
        ticket = row.ticket
        assert ticket.root is not None
        # The cache now holds the old root and all new tokens but the last, which is the next root.
        row.tokens.append(ticket.root)
        row.tokens.extend(new_tokens[:-1])
        ticket.root = new_tokens[-1]
        ticket.last_token = now
        ticket.rounds += rounds
        ticket.round_s += seconds

    def _emit(
        self, row: Row, played: RowRound, tree: Tree | None = None, scores: list[list[float]] | None = None
    ) -> int:
        """Send tokens up to the end of the answer; the number of them."""
        ids, origins, request = played.tokens, round_origins(played.from_lookup), row.ticket.request
        reason: FinishReason | None
        # A round can go past a stop token and past the limit; the tokens after them are dropped.
        room = request.max_new_tokens - row.ticket.new_tokens
        taken, reason = len(ids), None
        if not request.stop_ids.isdisjoint(ids):
            taken = next(number for number, token in enumerate(ids, 1) if token in request.stop_ids)
            reason = "stop" if taken <= room else None
        if reason is None and taken >= room:
            taken, reason = room, "length"
        self.backlog.left[row.index] = room - taken
        logprobs = list(played.logprobs[:taken]) if request.logprobs else None
        alternatives = None
        if scores is not None and request.alternatives:
            logprobs, alternatives = read_scores(scores[:taken], request.alternatives)
        self.clients.send(row.ticket, Tokens(list(ids[:taken]), origins[:taken], logprobs, tree, alternatives))
        if reason is not None:
            self._stop(row, reason)
        return taken

    def _stop_faulty(self, row: Row, fault: int) -> None:
        # The logits of a token come from the position before it.
        position = len(row.ticket.prompt) + row.ticket.new_tokens - 1
        self.intake.forget(row)
        self._stop(row, "error", fault_message(fault, position, row.ticket.request.sampling.temperature))

    def _stop(self, row: Row, reason: FinishReason, message: str = "") -> None:
        """End a row's request and keep what the cache holds of it."""
        ticket = row.ticket
        self._flush(row)
        self._ended.append(row)
        self._roster = None
        if row in self.intake.reading:
            self.intake.reading.remove(row)
        self.clients.finish(ticket, reason, message)
        self.rows.release(row)
        if self.controller is not None:
            self.controller.end(row.index)

    def _take_out(self) -> None:
        """Take the rows that have ended out of the rounds. No other request may have got them."""
        if self._ended:
            self.batch.end([row.number for row in self._ended], [len(row.tokens) for row in self._ended])
            self._ended.clear()
