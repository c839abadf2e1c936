"""Authenticated connections between the ranks of a run: every rank has one to rank 0."""

import os
import secrets
import socket
import time
from contextlib import suppress
from multiprocessing.connection import wait

import torch.distributed as dist

from longspec.errors import UserError
from longspec.train.distributed import from_every_rank, from_rank_zero

SECRET_BYTES = 16
GREETING_BYTES = SECRET_BYTES + 4
"""The launch's secret and the caller's rank."""
CONNECT_S = 60
"""Seconds in which all ranks must connect once all of them have started."""
GREETING_S = 5
"""Seconds in which a caller must send its greeting; it holds up nobody else meanwhile."""
SEND_S = 5
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A host without power closes nothing: its connections end after 30 s without an answer."""


def connect_ranks() -> dict[socket.socket, int]:
    """Rank 0's connections to all others, another rank's to rank 0; each with the peer's rank.

    Rank 0 listens on MASTER_ADDR's interface only, for as long as the others connect. They show a secret of this launch
    that rank 0 sends them through the process group. Raises UserError if a rank does not get through.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # Use the address that the last rank resolves. On rank 0's host its own name often resolves to loopback.
    host = from_every_rank(str(socket.getaddrinfo(os.environ["MASTER_ADDR"], None)[0][4][0]))[-1]
    listening: list[socket.socket] = []

    def listen() -> tuple[int, bytes]:
        family = socket.getaddrinfo(host, None)[0][0]
        try:
            listening.append(socket.create_server((host, 0), family=family, backlog=ranks))
        except OSError as error:
            raise UserError(
                f"MASTER_ADDR: rank 0 cannot listen on {host} ({error}); give an address of its host"
            ) from error
        return listening[0].getsockname()[1], secrets.token_bytes(SECRET_BYTES)

    port, secret = from_rank_zero(listen)
    if rank:
        try:
            peer = socket.create_connection((host, port), timeout=CONNECT_S)
            peer.sendall(secret + rank.to_bytes(4, "big"))
        except OSError as error:
            raise UserError(f"rank {rank} does not reach rank 0 at {host}, port {port}: {error}") from error
        found = {peer: 0}
    else:
        with listening[0] as server:
            found = greeted(server, secret, ranks - 1)
    for connection in found:
        connection.settimeout(SEND_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # as on Linux
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return found


def greeted(server: socket.socket, secret: bytes, count: int) -> dict[socket.socket, int]:
    """The first `count` callers that send `secret`, with their ranks. All others are dropped.

    Raises UserError if fewer have come after CONNECT_S seconds.
    """
    found: dict[socket.socket, int] = {}
    callers: dict[socket.socket, tuple[float, bytes]] = {}  # when the greeting must be complete, and its first bytes
    server.setblocking(False)
    deadline = time.monotonic() + CONNECT_S
    while len(found) < count and time.monotonic() < deadline:
        ready = wait([server, *callers], timeout=0.2)
        for caller in [one for one in callers if one in ready]:
            until, greeting = callers.pop(caller)
            part = b""
            with suppress(OSError):
                part = caller.recv(GREETING_BYTES - len(greeting))
            greeting += part
            if part and len(greeting) < GREETING_BYTES:
                callers[caller] = until, greeting
            elif secrets.compare_digest(greeting[:SECRET_BYTES], secret):
                found[caller] = int.from_bytes(greeting[SECRET_BYTES:], "big")
            else:
                caller.close()
        if server in ready:
            with suppress(OSError):  # a caller that hung up again
                caller, _ = server.accept()
                caller.setblocking(False)
                callers[caller] = time.monotonic() + GREETING_S, b""
        for caller in [one for one, (until, _) in callers.items() if until < time.monotonic()]:
            del callers[caller]
            caller.close()
    for caller in callers:
        caller.close()
    if len(found) < count:
        raise UserError(f"{count - len(found)} of {count} ranks did not connect to rank 0 within {CONNECT_S} s")
    return found
