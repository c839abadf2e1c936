"""The clients of an engine: events on their way to them, and the requests that they have cancelled."""

import logging
from collections.abc import Callable

from longspec.errors import first_line
from longspec.inference.engine.requests import Counts, Event, Finished, FinishReason, Ticket, Tokens

logger = logging.getLogger(__name__)


class Clients:
    """Events of a round wait here until the next round is launched."""

    def __init__(self) -> None:
        self.counts = Counts()
        self.open: set[Ticket] = set()
        """Tickets whose `Finished` was not sent."""
        self.waiting: list[tuple[Ticket, Event]] = []
        """Events that were not delivered."""
        self.has_unwanted = False
        """Whether a request was cancelled, or its client has failed."""
        self.on_finished: Callable[[], None] = lambda: None
        """Called after each `Finished`."""

    def cancel(self, ticket: Ticket, reason: FinishReason) -> None:
        """Mark a request, which ends before its next round."""
        ticket.cancelled = reason
        self.has_unwanted = True

    def send(self, ticket: Ticket, event: Event) -> None:
        if isinstance(event, Tokens):
            ticket.new_tokens += len(event.ids)
            self.counts.new_tokens += len(event.ids)
        self.waiting.append((ticket, event))

    def finish(self, ticket: Ticket, reason: FinishReason, message: str = "") -> None:
        """Send the last event of a request."""
        self.counts.finished[reason] += 1
        self.send(ticket, Finished(reason, message, ticket.timings))

    def finish_open(self, reason: FinishReason, message: str) -> None:
        """Finish the requests that have no `Finished` among their events."""
        ended = {ticket for ticket, event in self.waiting if isinstance(event, Finished)}
        for ticket in self.open - ended:
            self.finish(ticket, reason, message)

    def deliver(self) -> None:
        """Send the events. A failing `on_event` ends its own request alone."""
        events = self.waiting.copy()
        self.waiting.clear()
        for ticket, event in events:
            try:
                ticket.on_event(event)
            except Exception as error:  # it is the client's code
                logger.exception("on_event failed")
                ticket.failure = f"on_event failed: {first_line(error)}"
                self.has_unwanted = True
            if isinstance(event, Finished):
                self.open.remove(ticket)
                self.on_finished()
