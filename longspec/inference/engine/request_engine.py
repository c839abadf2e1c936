"""The engine: requests in, events out. It owns prefill, rounds, rows, captured rounds, plans and memory.

It runs on the thread that calls `step`. The server's scheduler is a thread around it.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from longspec.errors import UserError, first_line
from longspec.inference import engine_pool
from longspec.inference.adaptive.plans import MOST_SERVED_NODES
from longspec.inference.device import free_bytes
from longspec.inference.drafting.lookup import BRANCH_SIZES
from longspec.inference.drafting.reduced_head import head_bytes
from longspec.inference.engine.admission import (
    SHARE,
    check_request,
    chunk_bytes,
    fitting_rows,
    longest_request,
    row_capacity,
)
from longspec.inference.engine.batch import PREFILL_CHUNK, REPEATED, Batch
from longspec.inference.engine.requests import Finished, FinishReason, OnEvent, Request, Ticket
from longspec.inference.engine.worker import Worker
from longspec.inference.methods import AUTO, Drafting, list_length
from longspec.inference.process_group import end_calls, repeat_calls
from longspec.inference.request import Sampling
from longspec.inference.select_runner import make_runner
from longspec.models.glide import GlideMixin
from longspec.models.parallel import least_over_ranks, model_parallel_rank_and_size
from longspec.models.target_split import rank_config

logger = logging.getLogger(__name__)


class RequestEngine:
    """Answers requests with continuous batching; a row that finishes goes to the next request at once."""

    def __init__(
        self,
        model: GlideMixin,
        drafting: Drafting,
        max_rows: int,
        memory: int | None = None,
        longest: int | None = None,
        prefill_chunk: int = PREFILL_CHUNK,
        attention: str = "auto",
        compile: bool = True,
        details: bool = True,
    ) -> None:
        """drafting: checked settings. max_rows: requests that run at the same time. memory: bytes for their caches and
        passes; None takes 90% of the free memory. longest: most tokens of a prompt and its answer, for which rows are
        given up if memory is short; None gives rows up to the target's whole context. prefill_chunk: most prompt tokens
        of a pass. attention, compile: as for `longspec.generate`. details: whether requests may ask for
        log-probabilities and traces.

        Raises UserError if the memory does not suffice.
        """
        self.model = model
        settings = (drafting, max_rows, memory, longest, prefill_chunk, attention, compile, details)
        self.batch = repeat_calls(_build, model, {"settings": settings}, REPEATED)
        self.worker = Worker(self.batch, self.batch.max_rows, prefill_chunk)
        self.longest = longest_request(model.config, self.batch.capacity, self.batch.depth, self.batch.nodes)
        """Most tokens of a prompt and its answer together."""
        self.waiting: deque[Ticket] = deque()
        self.open: set[Ticket] = set()
        """Tickets whose `Finished` was not sent."""
        self._is_closed = False
        self.on_finished: Callable[[], None] = lambda: None
        """Called after each `Finished`."""

    def prepare(self, captures: bool = True, usual: Sampling | None = None) -> None:
        """Before the first request: measure the plans of method "auto", and capture what the usual requests need.

        captures: if False, each kind of round is captured when it is first played. usual: settings of most requests,
        whose penalties the captured rounds have.
        """
        with torch.no_grad(), torch.cuda.device_of(self.model.lm_head.weight):
            if captures:
                self.batch.capture(usual)
            self.batch.measure()

    def add(self, request: Request, on_event: OnEvent) -> Ticket:
        """Queue a request. Raises RequestTooLarge, and UserError for a malformed one."""
        check_request(request, self.model.config, self.longest)
        ticket = Ticket(request, on_event, time.perf_counter())
        self.open.add(ticket)
        self.waiting.append(ticket)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request before its next round; one that has finished stays as it is."""
        ticket.cancelled = True

    def step(self) -> bool:
        """Read a chunk of prompts, then play a round. Returns whether requests are left."""
        with torch.no_grad(), torch.cuda.device_of(self.model.lm_head.weight):
            # Clients that have gone must not hold places in the queue.
            # A copy, because the scheduler's clients add requests meanwhile.
            for ticket in [ticket for ticket in list(self.waiting) if ticket.cancelled]:
                self.waiting.remove(ticket)
                self.worker.refuse(ticket, "cancelled")
            self.worker.step(lambda: self.waiting.popleft() if self.waiting else None, self._deliver)
        return bool(self.open)

    def close(self) -> None:
        """Let the other ranks that share the target go on. No request may be left."""
        if not self._is_closed:
            end_calls()
        self._is_closed = True

    def end_all(self, reason: FinishReason, message: str) -> None:
        """End every request, without touching the device."""
        self.waiting.clear()
        self.worker.end_all(reason, message)
        # Every open request gets exactly one `Finished`.
        ended = {ticket for ticket, event in self.worker.outbox if isinstance(event, Finished)}
        for ticket in self.open - ended:  # in the queue, or taken from it when the engine failed
            self.worker.refuse(ticket, reason, message)
        self._deliver()

    def _deliver(self) -> None:
        """Send the events of the outbox. A failing `on_event` ends its own request alone."""
        outbox = self.worker.outbox.copy()
        self.worker.outbox.clear()
        for ticket, event in outbox:
            try:
                ticket.on_event(event)
            except Exception as error:  # it is the client's code
                logger.exception("on_event failed")
                ticket.failure = f"on_event failed: {first_line(error)}"
            if isinstance(event, Finished):
                ticket.done = True
                self.open.remove(ticket)
                self.on_finished()


def _build(model: GlideMixin, settings: tuple[Any, ...]) -> Batch:
    """The batch of an engine with these settings, which are the arguments of `RequestEngine`."""
    drafting, max_rows, memory, longest, prefill_chunk, attention, compile, details = settings
    runner = make_runner(model, attention, compile)
    engine_pool.release(model)  # the budget follows from the free memory
    if runner.device.type == "cuda":
        torch.cuda.empty_cache()
    whole_tree = 1 + sum(drafting.tree_shape) + (sum(BRANCH_SIZES) if drafting.lookup_branches else 0)
    by_method = {"vanilla": 1, "tree": min(drafting.tree_nodes or whole_tree, whole_tree), AUTO: MOST_SERVED_NODES}
    nodes, listed = by_method.get(drafting.method, drafting.gamma + 1), list_length(model, drafting)
    rank, ranks = model_parallel_rank_and_size()
    config = model.config if ranks == 1 else rank_config(model.config, rank, ranks)
    if memory is None:
        memory = least_over_ranks(int(free_bytes(runner.device) * SHARE), runner.device)
    fixed = head_bytes(config, runner.dtype, listed, max_rows) + chunk_bytes(config, runner.dtype, prefill_chunk)
    if longest is not None:
        max_rows = min(max_rows, fitting_rows(config, runner.dtype, longest, nodes, memory - fixed))
    capacity = row_capacity(config, runner.dtype, max_rows, nodes, memory, fixed, longest)
    with torch.no_grad(), torch.cuda.device_of(model.lm_head.weight):
        return Batch(runner, drafting, max_rows, capacity, prefill_chunk, details)


def check_positive(**values: int) -> None:
    """Raise UserError for a number below 1."""
    for name, value in values.items():
        if value < 1:
            raise UserError(f"{name}: {value}; it must be at least 1")
