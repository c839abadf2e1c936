"""Connections to rank 0: who is accepted, and how long others can delay it."""

import socket
import threading
import time
from contextlib import suppress

import pytest

from longspec.errors import UserError
from longspec.ranks import connections

SECRET = bytes(range(16))


def test_ranks_are_let_in_past_strangers_that_are_slow_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 waits neither for a silent caller, nor for half a greeting, nor for a wrong secret."""
    monkeypatch.setattr(connections, "GREETING_S", 60)
    ranks: dict[socket.socket, int] = {}
    with socket.create_server(("127.0.0.1", 0)) as server:
        listener = threading.Thread(target=lambda: ranks.update(connections.accept_ranks(server, SECRET, 2)))
        callers = [socket.create_connection(server.getsockname()) for _ in range(5)]
        silent, half, wrong, first, second = callers
        half.sendall(SECRET)
        wrong.sendall(SECRET[::-1] + (1).to_bytes(4, "big"))
        began = time.monotonic()
        listener.start()
        for rank, caller in ((1, first), (2, second)):
            caller.sendall(SECRET + rank.to_bytes(4, "big"))
        listener.join(timeout=connections.GREETING_S)
        assert not listener.is_alive() and time.monotonic() - began < connections.GREETING_S / 2
    assert sorted(ranks.values()) == [1, 2]
    assert {one.getpeername() for one in ranks} == {one.getsockname() for one in (first, second)}
    for stranger in (silent, half, wrong):
        stranger.settimeout(5)
        with suppress(ConnectionResetError):  # closed with unread bytes
            assert stranger.recv(1) == b""
    for one in (*callers, *ranks):
        one.close()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_rank_zero_listens_on_the_master_address_only(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    listened: list[str] = []
    monkeypatch.setenv("MASTER_ADDR", host)
    monkeypatch.setattr(connections.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(connections.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(connections, "from_every_rank", lambda mine: [mine])
    monkeypatch.setattr(connections, "from_rank_zero", lambda compute: compute())
    monkeypatch.setattr(connections, "accept_ranks", lambda server, *_: listened.append(server.getsockname()[0]) or {})
    connections.connect_ranks()
    assert listened[0] in ("127.0.0.1", "::1")


def test_a_caller_gets_few_seconds_and_a_missing_rank_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "GREETING_S", 0)
    monkeypatch.setattr(connections, "CONNECT_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as caller:
        with pytest.raises(UserError, match="1 of 1 ranks did not connect to rank 0"):
            connections.accept_ranks(server, SECRET, 1)
        caller.settimeout(5)
        assert caller.recv(1) == b""
