"""Limits of what one HTTP request may ask for, and the middleware that reads its body within them."""

import asyncio
from dataclasses import dataclass

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from longspec.inference.server.errors import ApiError, error_response


@dataclass(frozen=True)
class Limits:
    """Limits of one request. The scheduler limits prompt and answer by memory and by the target's positions."""

    max_seconds: float = 600.0
    """From the arrival of a request to its last token."""
    body_seconds: float = 30.0
    """Time in which a request's body must arrive."""
    max_body_bytes: int = 8 << 20
    max_messages: int = 1024
    max_choices: int = 16
    """Prompts times `n`; they must fit into the queue together."""
    max_stops: int = 16
    max_stop_characters: int = 1024
    default_new_tokens: int = 1024
    """Limit of a chat answer whose request sets none."""


class BodyLimit:
    """ASGI middleware: 413 for a body above `max_body_bytes`, 408 for one that takes longer than `body_seconds`."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self.app, self.limits = app, limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self.limits.body_seconds):
                body = await self._read(scope, receive)
        except (TimeoutError, ApiError) as error:
            late = ApiError(408, f"the body took longer than {self.limits.body_seconds:g} s to arrive")
            await error_response(error if isinstance(error, ApiError) else late)(scope, receive, send)
            return
        if body is not None:
            await self.app(scope, _replay(body, receive), send)

    async def _read(self, scope: Scope, receive: Receive) -> bytes | None:
        """The whole body; None if the client has gone. Raises ApiError."""
        limit = self.limits.max_body_bytes
        too_large = ApiError(413, f"the body is larger than {limit} bytes", close=True)
        # A declared length refuses the body unread; a chunked body declares none and is counted as it arrives.
        declared = dict(scope["headers"]).get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            raise too_large
        body, more = bytearray(), True
        while more:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            body += message.get("body", b"")
            more = message.get("more_body", False)
            if len(body) > limit:
                raise too_large
        return bytes(body)


def _replay(body: bytes, receive: Receive) -> Receive:
    """A channel that has the whole body as its first message."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def replayed() -> Message:
        return first.pop() if first else await receive()

    return replayed
