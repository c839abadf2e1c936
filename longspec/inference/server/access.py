"""The API key."""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from longspec.inference.server.errors import ApiError, error_response

OPEN_PATHS = ("/", "/health")
"""Paths that need no key."""


class KeyCheck:
    """ASGI middleware: 401 for a request without the key. It answers before the body is read."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self.expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The page has to load before it can ask for the key, and health checks of containers have none.
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._has_key(scope):
            await self.app(scope, receive, send)
            return
        message = "a valid API key is needed, as the header 'Authorization: Bearer KEY'"
        await error_response(ApiError(401, message, close=True))(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        """Takes the same time for every key of one length."""
        return hmac.compare_digest(Headers(scope=scope).get("authorization", "").encode(), self.expected)
