"""What a rank that ends by an exception leaves behind: a limit to its time, or none."""

import faulthandler
import socket

import pytest

from longspec.errors import UserError
from longspec.train import peers


@pytest.mark.parametrize(
    ("error", "limited"), [(RuntimeError("broken"), True), (UserError("no such file"), False), (SystemExit(2), False)]
)
def test_only_what_breaks_limits_the_time_a_rank_has_to_end(
    error: BaseException, limited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An end in one line is every rank's own, and its log may still be on its way, though a peer has ended before."""
    limits: list[str] = []
    here, there = socket.socketpair()
    monkeypatch.setattr(peers.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(peers, "_connections", lambda: {here: 1})
    monkeypatch.setattr(peers, "QUIET_S", 0)
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, exit: limits.append("set"))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", limits.clear)
    with there, here, pytest.raises(type(error)), peers.peers_watched():
        there.close()
        raise error
    assert bool(limits) is limited
