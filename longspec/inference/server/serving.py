"""Running the application with uvicorn: the socket, the addresses that are safe, and the end."""

import asyncio
import ipaddress
import logging
import socket
from typing import Any

import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from longspec.errors import UserError
from longspec.inference.server.errors import SERVER_STOPPED, ApiError

logger = logging.getLogger(__name__)

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
POLL_S = 0.1
"""Seconds between two looks for a second signal."""


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server at `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def allowed_hosts(host: str, api_key: str | None) -> list[str]:
    """The names under which clients may address a server; "*" are all. A web page can make a name of its own resolve to
    127.0.0.1, so a server without a key answers to its own names only."""
    return ["*"] if api_key is not None else list(dict.fromkeys((*LOOPBACK_NAMES, host)))


def listen(host: str, port: int, api_key: str | None) -> socket.socket:
    """A listening socket; port 0 takes a free one. Clients wait until the server runs. Raises UserError."""
    if not is_loopback(host) and api_key is None:
        raise UserError(f"--host {host}: other machines can reach this address, so it needs --api_key")
    if api_key is not None and not (api_key.isascii() and api_key.isprintable() and api_key.strip()):
        raise UserError("--api_key: must be of printable ASCII characters")
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        # All addresses include those of IPv4.
        both = host == "::" and socket.has_dualstack_ipv6()
        bound = socket.create_server((host, port), family=family, dualstack_ipv6=both)
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: cannot be bound ({error.strerror}); use another") from error
    # Connections inherit it: small writes are sent at once instead of after 40 ms.
    bound.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return bound


def url_of(bound: socket.socket) -> str:
    host, port = bound.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def _note_end_of_drain(record: logging.LogRecord) -> bool:
    """Filter of uvicorn's log. Its error at the end of the drain becomes a warning that names the option."""
    if not str(record.msg).startswith("Cancel %s running task"):
        return True
    if isinstance(record.args, tuple) and record.args[0]:  # with --drain_seconds 0, it also comes for no request
        logger.warning("%d open requests are cancelled at the end of --drain_seconds", record.args[0])
    return False


class _Server(uvicorn.Server):
    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        # From Python 3.12 on, uvicorn's own shutdown waits for open connections even after a second signal. What is
        # left of it then ends with the event loop, like the open requests.
        ending = asyncio.create_task(super().shutdown(sockets))
        while not ending.done() and not self.force_exit:
            await asyncio.wait([ending], timeout=POLL_S)
        if self.force_exit and self.server_state.tasks:
            logger.warning("%d open requests are cancelled by a second signal", len(self.server_state.tasks))
        if ending.done():
            ending.result()


def http_server(app: ASGIApp, drain_seconds: int) -> uvicorn.Server:
    """The server, to be run as `server.run(sockets=[...])` until a signal asks for the end. SIGTERM and SIGINT close
    the sockets, let running and queued requests finish for up to `drain_seconds`, and are raised again afterwards, so
    that the command ends as after any signal. Requests that are open then, or at a second signal, get an error."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await app(scope, receive, send)
        except asyncio.CancelledError:  # streams end themselves
            await ApiError(503, SERVER_STOPPED).response(scope, receive, send)

    chosen: dict[str, Any] = {"lifespan": "off", "ws": "none", "http": "h11", "log_level": "warning"}
    chosen |= dict.fromkeys(("access_log", "proxy_headers", "server_header"), False)
    config = uvicorn.Config(answer, timeout_graceful_shutdown=drain_seconds, **chosen)
    logging.getLogger("uvicorn.error").addFilter(_note_end_of_drain)
    return _Server(config)
