"""Authenticated TCP connections between rank 0 and every other rank of a run."""

import os
import secrets
import socket
import time
from contextlib import suppress

import torch.distributed as dist

from longspec.errors import UserError
from longspec.ranks.agreement import from_every_rank, from_rank_zero

SECRET_BYTES = 16
GREETING_BYTES = SECRET_BYTES + 4
"""Size of a greeting: the secret of the launch and the caller's rank."""
CONNECT_S = 60
"""Seconds in which all ranks must connect."""
GREETING_S = 5
"""Seconds without a byte after which a caller is dropped. A rank greets at once."""
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
        try:
            family = socket.getaddrinfo(host, None)[0][0]
            servers.append(socket.create_server((host, 0), family=family, backlog=world_size))
        except OSError as error:
            raise UserError(
                f"MASTER_ADDR: rank 0 cannot listen on {host} ({error}); give an address of its host"
            ) from error
        return servers[0].getsockname()[1], secrets.token_bytes(SECRET_BYTES)

    # The operating system chooses a free port; the process group tells it to the others.
    port, secret = from_rank_zero(listen)
    if rank == 0:
        with servers[0] as server:
            peers = accept_ranks(server, secret, world_size - 1)
    else:
        try:
            first = socket.create_connection((host, port), timeout=CONNECT_S)
            first.sendall(secret + rank.to_bytes(4, "big"))
        except OSError as error:
            raise UserError(f"rank {rank} does not reach rank 0 at {host}, port {port}: {error}") from error
        peers = {first: 0}
    for connection in peers:
        connection.settimeout(SEND_S)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # Linux has all of them
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
    return peers


def accept_ranks(server: socket.socket, secret: bytes, count: int) -> dict[socket.socket, int]:
    """The first `count` callers that send `secret`, and their ranks. Raises UserError after CONNECT_S seconds."""
    ranks: dict[socket.socket, int] = {}
    deadline = time.monotonic() + CONNECT_S
    while len(ranks) < count:
        try:
            server.settimeout(max(0.001, deadline - time.monotonic()))
            caller, _ = server.accept()
        except OSError as error:
            if not isinstance(error, TimeoutError) and time.monotonic() < deadline:
                continue  # a caller that has hung up already
            missing = count - len(ranks)
            raise UserError(f"{missing} of {count} ranks did not connect to rank 0 within {CONNECT_S} s") from error
        caller.settimeout(GREETING_S)
        greeting = receive(caller, GREETING_BYTES)
        # In constant time, so that a stranger cannot guess the secret byte by byte.
        if len(greeting) == GREETING_BYTES and secrets.compare_digest(greeting[:SECRET_BYTES], secret):
            ranks[caller] = int.from_bytes(greeting[SECRET_BYTES:], "big")
        else:
            caller.close()
    return ranks


def receive(connection: socket.socket, size: int) -> bytes:
    """The next `size` bytes; fewer if the connection ends or times out."""
    message = b""
    with suppress(OSError):
        while len(message) < size and (part := connection.recv(size - len(message))):
            message += part
    return message
