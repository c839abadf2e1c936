"""A rank that is gone ends the others.

A rank that waits for its device in a collective sees neither a signal nor that the peer it waits for has died: it sits
there until NCCL's timeout. DeepSpeed's launcher gives the ranks of its own host 30 s each to end, one after the other,
and does not know of those on other hosts. So every rank holds a connection to rank 0, which the system closes with the
process, and a thread that waits for that. Rank 0 passes the news on. Then the main thread has `END_S` seconds to end by
itself, as it does with a traceback wherever it waits on the host; after that the process prints where it is stuck and
ends.
"""

import faulthandler
import logging
import os
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from select import select

import torch.distributed as dist

from longspec.errors import UserError
from longspec.train.distributed import from_every_rank, from_rank_zero

logger = logging.getLogger(__name__)

END_S = 15
QUIET_S = 2
"""Ranks that end together need not say so."""
GREETING_S = 60
"""How long a rank may take to connect once all of them have started."""
KEEPALIVE = {"TCP_KEEPIDLE": 10, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
"""A host without power closes nothing: after 30 s without an answer its ranks are gone, too."""


@contextmanager
def peers_watched() -> Iterator[None]:
    """While it is entered on all ranks, one that dies or leaves it by an exception ends them all within a minute."""
    if dist.get_world_size() == 1:
        yield
        return
    connections = _connections()
    over = threading.Event()
    watch = threading.Thread(target=_watch, args=(connections, over), name="peers", daemon=True)
    watch.start()
    broken = False
    try:
        yield
        from_every_rank(None)  # from here on the end of a rank is none too early
    except (UserError, SystemExit):
        raise  # with all that is to be said, by all ranks as a rule; what W&B still has to do may take its time
    except BaseException:
        broken = True  # what this rank leaves on the device may keep it from ending
        raise
    finally:
        over.set()
        _close(connections)
        watch.join()
        if broken:
            _end_soon()
        else:
            faulthandler.cancel_dump_traceback_later()


def _connections() -> dict[socket.socket, int]:
    """Rank 0's connections to all others, another's to rank 0; each with the peer's rank."""
    rank, ranks, host = dist.get_rank(), dist.get_world_size(), os.environ["MASTER_ADDR"]
    listening: list[socket.socket] = []

    def listen() -> tuple[int, bytes]:
        family = socket.getaddrinfo(host, None)[0][0]
        listening.append(socket.create_server(("", 0), family=family, backlog=ranks))
        return listening[0].getsockname()[1], secrets.token_bytes(16)

    port, token = from_rank_zero(listen)
    if rank:
        peer = socket.create_connection((host, port), timeout=GREETING_S)
        peer.sendall(token + rank.to_bytes(4, "big"))
        found = {peer: 0}
    else:
        with listening[0] as server:
            found = _greeted(server, token, ranks - 1)
    for connection in found:
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if hasattr(socket, name):  # as on Linux
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)

    def close_in_child() -> None:
        """Loading processes are forks; one that outlives its rank must not keep the connection open."""
        for connection in found:
            connection.close()

    os.register_at_fork(after_in_child=close_in_child)
    return found


def _greeted(server: socket.socket, token: bytes, count: int) -> dict[socket.socket, int]:
    """The first `count` connections that know `token`; whoever else calls is not a rank."""
    found: dict[socket.socket, int] = {}
    server.settimeout(GREETING_S)
    while len(found) < count:
        peer, _ = server.accept()
        peer.settimeout(GREETING_S)
        with suppress(OSError), peer.makefile("rb") as reader:
            if secrets.compare_digest(reader.read(len(token)), token):
                found[peer] = int.from_bytes(reader.read(4), "big")
    return found


def _watch(connections: dict[socket.socket, int], over: threading.Event) -> None:
    """Wait for the first connection that closes, or brings the news that another one did; pass it on."""
    closed = select(connections, [], [])[0][0]
    if over.is_set():
        return
    news = b""
    with suppress(OSError):
        news = closed.recv(4)
    gone = int.from_bytes(news, "big") if news else connections[closed]
    for connection in connections:
        with suppress(OSError):
            connection.sendall(gone.to_bytes(4, "big"))
    _close(connections)
    _end_soon()
    if not over.wait(QUIET_S):
        logger.warning("rank %d is gone: this one ends, too, within %d s", gone, END_S)


def _close(connections: dict[socket.socket, int]) -> None:
    for connection in connections:
        with suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)  # which wakes whoever waits for it, here and there


def _end_soon() -> None:
    """Without Python, which a stuck main thread might hold."""
    faulthandler.dump_traceback_later(END_S, exit=True)
