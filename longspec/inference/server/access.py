"""Requests that are refused before their body is read: those for a foreign host, and those without the API key."""

import hmac
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from longspec.inference.server.errors import ApiError, error_response

OPEN_PATHS = ("/", "/health")
"""Paths that need no key."""


class KeyCheck:
    """ASGI middleware: 401 for a request without the key. It answers before the body is read."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self.app = app
        self.expected = api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # The page has to load before it can ask for the key, and health checks of containers have none.
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS or self._has_key(scope):
            await self.app(scope, receive, send)
            return
        message = "a valid API key is needed, as the header 'Authorization: Bearer KEY'"
        await error_response(ApiError(401, message, close=True))(scope, receive, send)

    def _has_key(self, scope: Scope) -> bool:
        """Takes the same time for every key of one length."""
        scheme, _, key = Headers(scope=scope).get("authorization", "").strip().partition(" ")
        # The name of a scheme has no case.
        return hmac.compare_digest(key.strip().encode(), self.expected) and scheme.lower() == "bearer"


class HostCheck:
    """ASGI middleware: 400 for a request whose Host header names another server."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str]) -> None:
        """hosts: accepted names; "*" is any."""
        self.app = app
        self.hosts = frozenset(host.lower() for host in hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = "" if scope["type"] != "http" else Headers(scope=scope).get("host", "")
        # A dot that ends a name and a port may follow. Colons of an IPv6 address are in brackets. Names have no case.
        if scope["type"] != "http" or "*" in self.hosts or re.sub(r"\.?(:\d*)?$", "", name).lower() in self.hosts:
            await self.app(scope, receive, send)
            return
        message = (
            f"the host '{name}' is not served here, only {', '.join(sorted(self.hosts))}; an API key lifts this limit"
        )
        await error_response(ApiError(400, message, close=True))(scope, receive, send)
