"""The scheduler: the engine on a thread of its own, for requests from any thread."""

import logging
from threading import Condition, Thread
from typing import Any

from longspec.errors import first_line
from longspec.inference.arguments import checked_drafting, chosen_attention
from longspec.inference.engine.batch import PREFILL_CHUNK
from longspec.inference.engine.request_engine import EngineSettings, RequestEngine
from longspec.inference.engine.requests import FinishReason, NotServing, OnEvent, QueueFull, Request, Snapshot, Ticket
from longspec.inference.methods import AUTO, Drafting
from longspec.inference.request import Sampling
from longspec.inference.token_options import check_integer
from longspec.models.glide import GlideMixin, check_pair

logger = logging.getLogger(__name__)


class Scheduler:
    """Answers requests from any thread but the engine's own, where `on_event` runs and may call `cancel`."""

    def __init__(
        self,
        model: GlideMixin,
        method: str = AUTO,
        max_rows: int = 16,
        memory: int | None = None,
        max_queue: int = 256,
        prefill_chunk: int = PREFILL_CHUNK,
        deterministic: bool = False,
        **drafting: Any,
    ) -> None:
        """method, drafting: the fields of `Drafting`. max_rows, memory, prefill_chunk: see `EngineSettings`. max_queue:
        requests that may wait. deterministic: as for `longspec.generate`. Raises UserError."""
        check_pair(model)
        checked = checked_drafting(model, Drafting(method, **drafting), allow_untrained_draft=False)
        for name, value in (("max_rows", max_rows), ("max_queue", max_queue), ("prefill_chunk", prefill_chunk)):
            check_integer(name, value, 1)
        attention = chosen_attention("auto", deterministic)
        settings = EngineSettings(checked, max_rows, memory, prefill_chunk=prefill_chunk, attention=attention)
        self.engine = RequestEngine(model, settings)
        self.engine.clients.on_finished = self._note_change
        self.batch, self._worker = self.engine.batch, self.engine.worker
        self.longest = self.engine.longest
        """Most tokens of a prompt and its answer together."""
        self.cache_bytes = self.batch.cache.keys.nbytes + self.batch.cache.values.nbytes
        self.max_queue = max_queue
        self._changed = Condition()
        self._submitted = 0
        self._ready = self._draining = self._closing = False
        self._error = ""
        self._thread = Thread(target=self._run, name="longspec-engine", daemon=True)

    def start(self, usual: Sampling | None = None) -> None:
        """Start the engine's thread and wait until it is prepared for `usual` requests, or raise NotServing."""
        self._usual = usual
        self._thread.start()
        with self._changed:
            self._changed.wait_for(lambda: self._ready or self._error)
            if self._error:
                raise NotServing(self._error)

    def submit(self, request: Request, on_event: OnEvent) -> Ticket:
        """Queue a request. Raises RequestTooLarge, QueueFull, NotServing, and UserError for a malformed one."""
        with self._changed:
            if self._draining or self._error or not self._ready:
                raise NotServing(self._error or "the server is shutting down" if self._ready else "not started")
            if len(self.engine.waiting) >= self.max_queue:
                raise QueueFull(f"{self.max_queue} requests are waiting")
            ticket = self.engine.add(request, on_event)
            self._submitted += 1
            self._changed.notify_all()
        return ticket

    def cancel(self, ticket: Ticket, reason: FinishReason = "cancelled") -> None:
        """End a request before its next round; one that has finished stays as it is."""
        with self._changed:
            self.engine.cancel(ticket, reason)
            self._changed.notify_all()

    def drain(self, timeout: float | None = None) -> bool:
        """Take no more requests and wait for the others, `timeout` seconds at most; whether all have finished."""
        with self._changed:
            self._draining = True
            return self._changed.wait_for(lambda: not self.engine.clients.open, timeout)

    def close(self) -> None:
        """Cancel all requests and end the engine's thread."""
        with self._changed:
            self._draining = self._closing = True
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join()
        self.engine.close()

    def snapshot(self) -> Snapshot:
        counts = self._worker.counts
        with self._changed:
            return Snapshot(
                healthy=self._thread.is_alive() and not self._error,
                error=self._error,
                max_rows=self.batch.max_rows,
                capacity=self.batch.capacity,
                queued=len(self.engine.waiting),
                running=len(self._worker.rows.busy()),
                requests=self._submitted,
                **vars(counts) | {"finished": counts.finished.copy()},
            )

    def _run(self) -> None:
        """The engine's thread."""
        try:
            self.engine.prepare(usual=self._usual)
            self._ready = True
            self._note_change()
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._closing or self.engine.clients.open)
                    if self._closing:
                        break
                self.engine.step()
            self._worker.end_all("cancelled", "")
        except Exception as error:  # the engine is lost: every request learns it, and so does the health check
            logger.exception("the engine failed")
            with self._changed:
                self._error = f"the engine failed: {first_line(error)}"
            self._worker.end_all("error", self._error)
            self._note_change()

    def _note_change(self) -> None:
        with self._changed:
            self._changed.notify_all()
