"""Requests that are refused before their body is read: those for a foreign host, and those without the API key."""

import hmac
import re
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from longspec.inference.server.errors import ApiError

OPEN_PATHS = ("/", "/health")
"""Paths that need no key: the page has to load before it can ask for one, and health checks of containers have none."""


class AccessCheck:
    """ASGI middleware: 400 for a request whose Host header names another server, 401 for one without the key."""

    def __init__(self, app: ASGIApp, api_key: str | None, hosts: Sequence[str]) -> None:
        """api_key: None needs none. hosts: accepted names; "*" is any."""
        self.app, self.api_key, self.hosts = app, api_key, hosts

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        refusal = self._refusal(scope["path"], Headers(scope=scope)) if scope["type"] == "http" else None
        await (self.app if refusal is None else refusal.response)(scope, receive, send)

    def _refusal(self, path: str, headers: Headers) -> ApiError | None:
        # A dot that ends a name and a port may follow. Colons of an IPv6 address are in brackets. Names have no case.
        name = headers.get("host", "")
        if "*" not in self.hosts and re.sub(r"\.?(:\d*)?$", "", name).lower() not in self.hosts:
            served = ", ".join(self.hosts)
            return ApiError(400, f"the host '{name}' is not served here, only {served}; an API key lifts this limit")
        # The name of a scheme has no case. The comparison takes the same time for every key of one length.
        scheme, _, key = headers.get("authorization", "").strip().partition(" ")
        is_own = hmac.compare_digest(key.strip().encode(), (self.api_key or "").encode())
        if self.api_key is None or path in OPEN_PATHS or (is_own and scheme.lower() == "bearer"):
            return None
        return ApiError(401, "a valid API key is needed, as the header 'Authorization: Bearer KEY'")
