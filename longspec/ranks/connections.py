"""Authenticated TCP connections between rank 0 and every other rank of a run."""

import os
import secrets
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait

import torch.distributed as dist

from longspec.errors import UserError
from longspec.ranks.agreement import from_every_rank, from_rank_zero

SECRET_BYTES = 16
GREETING_BYTES = SECRET_BYTES + 4
"""Size of a greeting: the secret of the launch and the caller's rank."""
CONNECT_S = 60
"""Seconds in which all ranks must connect."""
GREETING_S = 5
"""Seconds in which a caller must send its greeting. Rank 0 serves the others meanwhile."""
SEND_S = 5
"""Time limit in seconds of one send or receive."""
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""Socket options that end a connection after 30 s without an answer. A host without power closes nothing itself."""


def connect_ranks() -> dict[socket.socket, int]:
    """Connect all ranks to rank 0. Returns each connection of this rank with the peer's rank.

    Rank 0 listens on the interface of MASTER_ADDR until all others have connected. Each of them authenticates with a
    secret that rank 0 sends through the process group. Raises UserError if a rank cannot connect.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    # Use the address that the last rank resolves. On rank 0's host its own name often resolves to loopback.
    host = from_every_rank(str(socket.getaddrinfo(os.environ["MASTER_ADDR"], None)[0][4][0]))[-1]
    servers: list[socket.socket] = []

    def listen() -> tuple[int, bytes]:
        servers.append(_listen(host, world_size))
        return servers[0].getsockname()[1], secrets.token_bytes(SECRET_BYTES)

    # The operating system chooses a free port; the process group tells it to the others.
    port, secret = from_rank_zero(listen)
    if rank == 0:
        with servers[0] as server:
            peers = accept_ranks(server, secret, world_size - 1)
    else:
        peers = {_connect(host, port, secret, rank): 0}
    for connection in peers:
        _configure(connection)
    return peers


def _listen(host: str, world_size: int) -> socket.socket:
    family = socket.getaddrinfo(host, None)[0][0]
    try:
        return socket.create_server((host, 0), family=family, backlog=world_size)
    except OSError as error:
        raise UserError(
            f"MASTER_ADDR: rank 0 cannot listen on {host} ({error}); give an address of its host"
        ) from error


def _connect(host: str, port: int, secret: bytes, rank: int) -> socket.socket:
    try:
        connection = socket.create_connection((host, port), timeout=CONNECT_S)
        connection.sendall(secret + rank.to_bytes(4, "big"))
    except OSError as error:
        raise UserError(f"rank {rank} does not reach rank 0 at {host}, port {port}: {error}") from error
    return connection


def _configure(connection: socket.socket) -> None:
    connection.settimeout(SEND_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in KEEPALIVE.items():
        if hasattr(socket, name):  # Linux has all of them
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)


@dataclass
class _Caller:
    """A connection that has not sent its whole greeting yet."""

    deadline: float
    greeting: bytes = b""

    def receive(self, connection: socket.socket) -> bool:
        """Read more of the greeting. Returns whether more of it is expected."""
        part = b""
        with suppress(OSError):
            part = connection.recv(GREETING_BYTES - len(self.greeting))
        self.greeting += part
        return bool(part) and len(self.greeting) < GREETING_BYTES

    def rank(self, secret: bytes) -> int | None:
        """The caller's rank; None if the greeting does not start with `secret`."""
        # In constant time, so that a stranger cannot guess the secret byte by byte.
        if not secrets.compare_digest(self.greeting[:SECRET_BYTES], secret):
            return None
        return int.from_bytes(self.greeting[SECRET_BYTES:], "big")


def accept_ranks(server: socket.socket, secret: bytes, count: int) -> dict[socket.socket, int]:
    """Accept `count` callers that send `secret`, and return them with their ranks. All others are dropped.

    Raises UserError if fewer have come after CONNECT_S seconds.
    """
    ranks: dict[socket.socket, int] = {}
    callers: dict[socket.socket, _Caller] = {}
    server.setblocking(False)
    deadline = time.monotonic() + CONNECT_S
    while len(ranks) < count and time.monotonic() < deadline:
        # A short timeout, so that late callers are dropped on time.
        ready = wait([server, *callers], timeout=0.2)
        for connection in [connection for connection in callers if connection in ready]:
            caller = callers[connection]
            if caller.receive(connection):
                continue
            del callers[connection]
            rank = caller.rank(secret)
            if rank is None:
                connection.close()
            else:
                ranks[connection] = rank
        if server in ready:
            # The caller may have hung up already.
            with suppress(OSError):
                connection, _ = server.accept()
                connection.setblocking(False)
                callers[connection] = _Caller(time.monotonic() + GREETING_S)
        _drop_late(callers)
    for connection in callers:
        connection.close()
    if len(ranks) < count:
        raise UserError(f"{count - len(ranks)} of {count} ranks did not connect to rank 0 within {CONNECT_S} s")
    return ranks


def _drop_late(callers: dict[socket.socket, _Caller]) -> None:
    """Close the connections whose greeting took too long."""
    now = time.monotonic()
    for connection in [connection for connection, caller in callers.items() if caller.deadline < now]:
        del callers[connection]
        connection.close()
