"""The watching thread of a rank: time limits for ending, and requests to stop."""

import faulthandler
import signal
import socket
from collections.abc import Iterator

import pytest

from longspec.errors import UserError
from longspec.ranks import peers
from longspec.ranks.agreement import Termination


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Rank 1's end of its connection to this rank, which is rank 0 of 2."""
    here, there = socket.socketpair()
    monkeypatch.setattr(peers.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(peers, "connect_ranks", lambda: {here: 1})
    monkeypatch.setattr(peers, "from_every_rank", lambda _: None)
    monkeypatch.setattr(peers, "QUIET_S", 0)
    monkeypatch.setattr(peers, "TICK_S", 0.01)
    here.settimeout(0.1)
    there.settimeout(10)
    with here, there:
        yield there


@pytest.mark.parametrize(
    ("error", "limited"), [(RuntimeError("broken"), True), (UserError("no such file"), False), (SystemExit(2), False)]
)
def test_only_what_breaks_limits_the_time_a_rank_has_to_end(
    error: BaseException, limited: bool, other: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an error line every rank ends by itself, and its log may still be uploading although a peer has ended."""
    limits: list[str] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, exit: limits.append("set"))
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", limits.clear)
    with pytest.raises(type(error)), peers.watched(Termination()) as watch:
        watch.connect()
        other.close()
        raise error
    assert bool(limits) is limited


def test_a_step_may_be_finished_for_a_while(one_rank: None) -> None:
    """`train_step` passes a patience inside a step and 0 before it."""
    termination = Termination()
    assert not termination.agreed() and not termination.agreed(0)
    termination.received = signal.SIGINT
    assert not termination.agreed(100) and termination.agreed()
    assert termination.received == signal.SIGINT
