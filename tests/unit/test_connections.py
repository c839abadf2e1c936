"""Connections to rank 0: who is accepted, and how long others can delay it."""

import socket
from contextlib import suppress

import pytest

from longspec.errors import UserError
from longspec.ranks import connections

SECRET = bytes(range(16))


def test_ranks_are_let_in_past_strangers_that_are_slow_or_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """A silent caller, half a greeting and a wrong secret are dropped. A missing rank is one line."""
    monkeypatch.setattr(connections, "GREETING_S", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as server:
        callers = [socket.create_connection(server.getsockname()) for _ in range(5)]
        _, half, wrong, first, second = callers
        half.sendall(SECRET)
        wrong.sendall(SECRET[::-1] + (1).to_bytes(4, "big"))
        for rank, caller in ((1, first), (2, second)):
            caller.sendall(SECRET + rank.to_bytes(4, "big"))
        ranks = connections.accept_ranks(server, SECRET, 2)
        monkeypatch.setattr(connections, "CONNECT_S", 0.1)
        with pytest.raises(UserError, match="1 of 1 ranks did not connect to rank 0"):
            connections.accept_ranks(server, SECRET, 1)
    assert {one.getpeername(): rank for one, rank in ranks.items()} == {first.getsockname(): 1, second.getsockname(): 2}
    for stranger in callers[:3]:
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
