"""Admission and prefill: rows for the next requests, and passes over their prompts."""

import logging
import secrets
import time
from array import array
from collections import deque
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch

from longspec.errors import first_line
from longspec.inference.engine.batch import Batch
from longspec.inference.engine.clients import Clients
from longspec.inference.engine.prefill import PREFILL_ROWS, PREFILL_TOKENS, joined_rows
from longspec.inference.engine.requests import PromptScores, Ticket
from longspec.inference.engine.round_record import RowRound, read_scores
from longspec.inference.engine.rows import Row, Rows, common_prefix

logger = logging.getLogger(__name__)

LEAST_SHARED = 64
"""Tokens of a prefix for which a request waits until another row has read them."""
LEAST_COPIED = 256
"""The same where a GPU refills rows together, which reuse no shorter prefix: to read it again costs less than a pass
for the few rows that have it."""


def least_shared(refill: int, device: torch.device) -> int:
    """Tokens of a prefix from which on a request waits for another row. refill: see `EngineSettings`."""
    return LEAST_COPIED if refill > 1 and device.type == "cuda" else LEAST_SHARED


class Outcome(NamedTuple):
    """The end of a prompt's prefill."""

    row: Row
    played: RowRound = RowRound([0])
    """The first token of the answer, as of a round."""
    scores: list[list[float]] | None = None
    """`round_record.scores` of the token, if any request asks for alternatives."""
    failure: str = ""
    """Why the prompt could not be read; the other fields then have no meaning."""


class Intake:
    """The requests between the queue and the rounds."""

    def __init__(self, batch: Batch, rows: Rows, clients: Clients, chunk: int | None, refill: int) -> None:
        """chunk: most prompt tokens that are read between two rounds; None reads all prompts before the first one.
        refill: see `EngineSettings`."""
        self.batch, self.rows, self.clients = batch, rows, clients
        self.reads_all = chunk is None
        self.chunk = PREFILL_TOKENS if chunk is None else chunk
        """Most tokens of a pass."""
        self.refill = refill
        self.least_shared = least_shared(refill, batch.device)
        self.waiting: deque[Ticket] = deque()
        """Requests without a row. Other threads add some."""
        self.reading: list[Row] = []
        """The rows whose prompts are read, in order of arrival."""
        self.held: Ticket | None = None
        """The next request, while another row reads a prefix of its prompt."""

    def read(self) -> Iterator[list[Outcome]]:
        """Give rows to the waiting requests and read at most `chunk` tokens of their prompts, or all of them. Yields
        what each pass ends."""
        budget = self.chunk
        # Where rows are refilled together, a step ends once half of the chunk is read: the rest would go to passes over
        # few rows.
        least = (self.chunk + 1) // 2 if self.refill > 1 else 1
        while budget >= least:
            self._admit()
            if not self.reading:
                return
            rows = self._next_rows(budget)
            try:
                budget -= self._read(rows, budget)
                outcomes = self._begin(rows)
            except Exception as error:  # a request's own failure; one of the device shows again in the next round
                if self.reads_all:
                    raise
                logger.exception("prefill failed")
                outcomes = self._give_up(rows, f"prefill failed: {first_line(error)}")
            yield outcomes
            if self.reads_all:
                budget = self.chunk

    def is_due(self) -> bool:
        """Whether enough rows are idle for the next requests."""
        return bool(self.reading) or len(self.rows.idle) >= self.refill

    def drop_cancelled(self) -> None:
        """End the requests without a row that were cancelled: they must not hold places in the queue."""
        for ticket in [*self.waiting]:  # a copy, because other threads add requests meanwhile
            if ticket.cancelled:
                self.waiting.remove(ticket)
                self.clients.finish(ticket, ticket.cancelled)
        if self.held is not None and self.held.cancelled:
            self.clients.finish(self.held, self.held.cancelled)
            self.held = None

    def forget(self, row: Row) -> None:
        """Drop what the cache holds of a row."""
        # Not to be offered as a prefix to a later request: NaN in it would spread.
        row.tokens = array("q")
        self.batch.end([row.number], [0])
        self.batch.clear(row.number)

    def _give_up(self, rows: list[Row], failure: str) -> list[Outcome]:
        """Of several rows, each is read alone, which tells whose failure it is."""
        for row in rows:
            self.forget(row)
            if len(rows) > 1:
                row.ticket.reads_alone = True
        return [Outcome(rows[0], failure=failure)] if len(rows) == 1 else []

    def _admit(self) -> None:
        """Give rows to the waiting requests, as many as the next passes read."""
        if not self.is_due():
            return
        unread = sum(row.unread for row in self.reading)
        admitted: list[Row] = []
        while self.rows.idle and unread < self.chunk and (self.held or self.waiting):
            ticket, self.held = self.held or self.waiting.popleft(), None
            ticket.prompt = np.array(ticket.request.prompt, dtype=np.int64)
            if not self.reads_all and self._is_read(ticket.prompt):
                self.held = ticket
                break
            row = self._give_row(ticket)
            unread += row.unread
            admitted.append(row)
            self.reading.append(row)
        if admitted:
            requests = [row.ticket.request for row in admitted]
            samplings = [request.sampling for request in requests]
            # Every row has a seed, so that its random numbers do not depend on the other rows.
            seeds = [secrets.randbits(64) if sampling.seed is None else sampling.seed for sampling in samplings]
            numbers, lengths = [row.number for row in admitted], [len(row.tokens) for row in admitted]
            self.batch.assign(numbers, lengths, samplings, seeds, [request.speculate for request in requests])

    def _is_read(self, prompt: np.ndarray) -> bool:
        """Whether a row is reading a prefix of a prompt, which can be copied later. prompt: int64 [P]."""
        least = self.least_shared
        if len(prompt) < least or self.batch.drafter.layer_inputs:
            return False
        head = prompt[:least].tobytes()
        return any(
            # Few prompts begin alike, and this is asked for each pair of rows that start together.
            row.ticket.prompt[:least].tobytes() == head
            and common_prefix(prompt, row.ticket.prompt) >= len(row.tokens) + least
            for row in self.reading
        )

    def _give_row(self, ticket: Ticket) -> Row:
        """Give a row to a request, and the prefix that some row shares with it."""
        request, prompt = ticket.request, ticket.prompt
        row, source, cached = self.rows.take(prompt)
        if self.refill > 1:
            cached -= cached % self.least_shared  # rows that have read equally many tokens are read together
        # To score a prompt, and for a draft that reads layers, the target has to read each of its tokens.
        if request.scores_prompt or self.batch.drafter.layer_inputs:
            source, cached = row, 0
        # The longest common prefix may be in a row that is busy, so it is copied.
        if row is not source:
            self.batch.copy_prefix(source.number, row.number, cached)
        row.tokens = array("q", prompt[:cached].tobytes())
        row.job, ticket.reads_alone = ticket, request.scores_prompt
        ticket.started, ticket.cached_prompt_tokens = time.perf_counter(), cached
        ticket.setup_before = self.batch.seconds_of_setup
        self.clients.counts.prompt_tokens += len(request.prompt)
        self.clients.counts.cached_prompt_tokens += cached
        return row

    def _next_rows(self, budget: int) -> list[Row]:
        """The rows of the next pass: the first one whose prompt is read, and rows next to it that are as far."""
        first = self.reading[0]
        start = len(first.tokens)
        if first.ticket.reads_alone:
            return [first]
        equal = {row.number: row for row in self.reading if len(row.tokens) == start and not row.ticket.reads_alone}
        # Where passes are captured, each takes one row, so long prompts are not read in turns.
        reader = self.batch.reader
        is_captured = reader.captures and min(first.unread, budget) <= reader.sizes[-1]
        most_rows = 1 if is_captured else PREFILL_ROWS
        groups = joined_rows([(number, equal[number].unread) for number in sorted(equal)], budget, most_rows)
        group = next(group for group in groups if group.start <= first.number < group.stop)
        return [equal[number] for number in range(group.start, group.stop)]

    def _read(self, rows: list[Row], budget: int) -> int:
        """Read on in the prompts of consecutive rows; the number of tokens read."""
        start = len(rows[0].tokens)
        end = start + min(max(row.unread for row in rows), max(1, budget // len(rows)))
        chunks = [row.ticket.prompt[start:end] for row in rows]
        if (ticket := rows[0].ticket).request.scores_prompt:
            following = ticket.prompt[start + 1 : end + 1]
            lines = self.batch.read_scored(rows[0].number, chunks[0], following, start)
            self.clients.send(ticket, PromptScores(*read_scores(lines, ticket.request.alternatives)))
        else:
            self.batch.read_prompts(slice(rows[0].number, rows[-1].number + 1), chunks, start)
        for row, chunk in zip(rows, chunks, strict=True):
            row.tokens.frombytes(chunk.tobytes())
        return max(map(len, chunks)) * len(rows)

    def _begin(self, rows: list[Row]) -> list[Outcome]:
        """Choose the first tokens of those rows whose prompts were read. They take part in the next round."""
        complete = [number for number, row in enumerate(rows) if not row.unread]
        chosen = []
        scored = any(row.ticket.request.alternatives for row in rows)
        for part in joined_rows([(number, 1) for number in complete], len(rows)):
            kind = self.batch.kind_of([row.ticket.request.sampling for row in rows[part]])
            numbers = slice(rows[part.start].number, rows[part.stop - 1].number + 1)
            prompts = [row.ticket.prompt for row in rows[part]]
            chosen.append(self.batch.first_tokens(numbers, part, prompts, kind, scored))
        # One transfer for all that the host reads.
        lines = torch.cat(chosen).tolist() if chosen else []
        for number in complete:
            ticket = rows[number].ticket
            ticket.setup_s = self.batch.seconds_of_setup - ticket.setup_before
        outcomes = [
            Outcome(rows[number], RowRound([int(root)], logprobs=[logprob], fault=int(fault)), [line] if line else None)
            for number, (root, logprob, fault, *line) in zip(complete, lines, strict=True)
        ]
        self.reading = [row for row in self.reading if row.unread]
        return outcomes
