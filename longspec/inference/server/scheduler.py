"""The scheduler: continuous batching of requests on one engine thread."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Sequence
from threading import Condition, Thread

import torch

from longspec.errors import UserError, first_line
from longspec.inference import engine_pool
from longspec.inference.adaptive.plans import MOST_SERVED_NODES
from longspec.inference.arguments import checked_drafting
from longspec.inference.drafting.lookup import BRANCH_SIZES
from longspec.inference.drafting.reduced_head import head_bytes, list_length
from longspec.inference.methods import AUTO, DEFAULT_SHAPE, Drafting
from longspec.inference.select_runner import make_runner
from longspec.inference.server.admission import check_request, chunk_bytes, longest_request, row_capacity
from longspec.inference.server.batch import PREFILL_CHUNK, Batch
from longspec.inference.server.requests import (
    Finished,
    FinishReason,
    NotServing,
    OnEvent,
    QueueFull,
    Request,
    Snapshot,
    Ticket,
)
from longspec.inference.server.worker import Worker
from longspec.models.glide import GlideMixin, check_pair

logger = logging.getLogger(__name__)


class Scheduler:
    """Answers requests on a static number of rows; a row that finishes goes to the next request at once.

    All methods may be called from any thread but the engine's own, where `on_event` runs; `cancel` may be called there
    too.
    """

    def __init__(
        self,
        model: GlideMixin,
        method: str = AUTO,
        tree_shape: Sequence[int] = DEFAULT_SHAPE,
        gamma: int = 4,
        tree_rule: str = "reject",
        max_rows: int = 16,
        memory: int | None = None,
        max_queue: int = 256,
        prefill_chunk: int = PREFILL_CHUNK,
        attention: str = "auto",
        compile: bool = True,
        allow_untrained_draft: bool = False,
        tree_nodes: int | None = None,
        lookup_branches: bool = False,
    ) -> None:
        """The drafting settings, tree_nodes and lookup_branches included, attention, compile and
        allow_untrained_draft are those of `longspec.generate`.

        max_rows: requests that run at the same time; memory: bytes for their caches and passes, None takes 90% of the
        free memory; max_queue: requests that may wait; prefill_chunk: most prompt tokens read between two rounds.
        Raises UserError.
        """
        check_pair(model)
        drafting = Drafting(method, tree_shape, gamma, tree_rule, tree_nodes, lookup_branches)
        drafting = checked_drafting(model, drafting, allow_untrained_draft)
        for name, value in (("max_rows", max_rows), ("max_queue", max_queue), ("prefill_chunk", prefill_chunk)):
            if value < 1:
                raise UserError(f"{name}: {value}; it must be at least 1")
        self.model = model
        runner = make_runner(model, attention, compile)
        engine_pool.release(model)  # the budget follows from the free memory
        whole_tree = 1 + sum(drafting.tree_shape) + (sum(BRANCH_SIZES) if lookup_branches else 0)
        by_method = {"vanilla": 1, "tree": min(tree_nodes or whole_tree, whole_tree), AUTO: MOST_SERVED_NODES}
        nodes, listed = by_method.get(method, gamma + 1), list_length(model, drafting)
        fixed = head_bytes(model.config, runner.dtype, listed, max_rows)
        fixed += chunk_bytes(model.config, runner.dtype, prefill_chunk)
        capacity = row_capacity(model.config, runner.dtype, runner.device, max_rows, nodes, memory, fixed)
        with torch.no_grad(), torch.cuda.device_of(model.lm_head.weight):
            self.batch = Batch(runner, drafting, max_rows, capacity, prefill_chunk)
        self.longest = longest_request(model.config, capacity, self.batch.depth, self.batch.nodes)
        """Most tokens of a prompt and its answer together."""
        self.max_queue = max_queue
        self._worker = Worker(self.batch, max_rows, prefill_chunk)
        self._changed = Condition()
        self._waiting: deque[Ticket] = deque()
        self._open: set[Ticket] = set()
        """Tickets whose `Finished` was not sent."""
        self._submitted = 0
        self._ready = self._draining = self._closing = False
        self._error = ""
        self._thread = Thread(target=self._run, name="longspec-engine", daemon=True)

    def start(self) -> None:
        """Start the engine's thread and wait until its graphs are captured. Raises NotServing if that fails."""
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error)
            if self._error:
                raise NotServing(self._error)

    def submit(self, request: Request, on_event: OnEvent) -> Ticket:
        """Queue a request. Raises RequestTooLarge, QueueFull, NotServing, and UserError for a malformed one."""
        check_request(request, self.model.config, self.longest)
        with self._changed:
            if self._draining or self._error or not self._ready:
                raise NotServing(self._error or "the server is shutting down" if self._ready else "not started")
            if len(self._waiting) >= self.max_queue:
                raise QueueFull(f"{self.max_queue} requests are waiting")
            ticket = Ticket(request, on_event, time.perf_counter())
            self._waiting.append(ticket)
            self._open.add(ticket)
            self._submitted += 1
            self._changed.notify_all()
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request before its next round; one that has finished stays as it is."""
        with self._changed:
            ticket.cancelled = True
            self._changed.notify_all()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests and wait for the others, `timeout` seconds at most; whether all have finished."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not self._open, timeout)

    def close(self) -> None:
        """Cancel all requests and end the engine's thread."""
        with self._changed:
            self._draining = self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()

    def snapshot(self) -> Snapshot:
        counts = self._worker.counts
        with self._changed:
            return Snapshot(
                healthy=self._thread.is_alive() and not self._error,
                error=self._error,
                max_rows=self.batch.max_rows,
                capacity=self.batch.capacity,
                queued=len(self._waiting),
                running=len(self._worker.rows.busy()),
                requests=self._submitted,
                finished=dict(counts.finished),
                prompt_tokens=counts.prompt_tokens,
                cached_prompt_tokens=counts.cached_prompt_tokens,
                new_tokens=counts.new_tokens,
                rounds=counts.rounds,
                row_rounds=counts.row_rounds,
                accepted_tokens=counts.accepted_tokens,
                decoded_tokens=counts.decoded_tokens,
            )

    def _run(self) -> None:
        """The engine's thread."""
        try:
            with torch.no_grad(), torch.cuda.device_of(self.model.lm_head.weight):
                self.batch.capture()
                with self._changed:
                    self._ready = True
                    self._changed.notify_all()
                while self._wait_for_work():
                    self._worker.step(self._next_ticket, self._deliver)
            self._end_all("cancelled", "")
        except Exception as error:  # the engine is lost: every request learns it, and so does the health check
            logger.exception("the engine failed")
            with self._changed:
                self._error = f"the engine failed: {first_line(error)}"
            self._end_all("error", self._error)

    def _wait_for_work(self) -> bool:
        """Wait for a request or the end; False at the end. Requests that were cancelled leave the queue."""
        with self._changed:
            self._changed.wait_for(lambda: self._closing or self._open)
            # Clients that have gone must not hold places in the queue.
            for ticket in [ticket for ticket in self._waiting if ticket.cancelled]:
                self._waiting.remove(ticket)
                self._worker.refuse(ticket, "cancelled")
            return not self._closing

    def _next_ticket(self) -> Ticket | None:
        with self._changed:
            return self._waiting.popleft() if self._waiting else None

    def _deliver(self) -> None:
        """Send the events of the outbox. A failing `on_event` ends its own request alone."""
        outbox, self._worker.outbox = self._worker.outbox, []
        for ticket, event in outbox:
            try:
                ticket.on_event(event)
            except Exception as error:  # it is the client's code
                logger.exception("on_event failed")
                ticket.failure = f"on_event failed: {first_line(error)}"
            if isinstance(event, Finished):
                with self._changed:
                    ticket.done = True
                    self._open.remove(ticket)
                    self._changed.notify_all()

    def _end_all(self, reason: FinishReason, message: str) -> None:
        with self._changed:
            self._draining = True
            self._waiting.clear()
        self._worker.end_all(reason, message)
        # Every open request gets exactly one `Finished`.
        ended = {ticket for ticket, event in self._worker.outbox if isinstance(event, Finished)}
        for ticket in self._open - ended:  # in the queue, or taken from it when the engine failed
            self._worker.refuse(ticket, reason, message)
        self._deliver()
        with self._changed:
            self._changed.notify_all()
