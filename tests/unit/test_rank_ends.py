"""The watching thread of a rank: time limits for ending, and requests to stop."""

import faulthandler
import os
import signal
import socket
from collections.abc import Iterator
from contextlib import nullcontext

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


def test_a_silent_rank_is_named_and_limits_the_time_too(
    other: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A rank stopped by SIGSTOP is silent, but its connection stays open."""
    monkeypatch.setattr(peers, "SILENT_S", 0.1)
    limits: list[str] = []
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda seconds, exit: limits.append("set"))
    with pytest.raises(RuntimeError), peers.watched(Termination()) as watch:
        watch.connect()
        watch._thread.join(timeout=10)
        assert not watch._thread.is_alive() and limits == ["set"]
        raise RuntimeError("what the main thread gets of it")
    faulthandler.cancel_dump_traceback_later()
    assert [record.getMessage() for record in caplog.records] == [
        f"rank 1 does not answer; this rank ends within {peers.END_S} s"
    ]
    messages = list(peers.MESSAGE.iter_unpack(other.recv(2**16)))
    assert (peers.BEAT, 0) in messages and messages[-1] == (peers.SILENT, 1)


def test_a_step_may_be_finished_for_a_while(one_rank: None) -> None:
    """`train_step` passes a patience inside a step and 0 before it."""
    termination = Termination()
    assert not termination.agreed() and not termination.agreed(0)
    termination.received = signal.SIGINT
    assert not termination.agreed(100) and termination.agreed()
    assert termination.received == signal.SIGINT


@pytest.mark.parametrize("rank", ["0", "3"])
def test_before_the_ranks_connect_rank_0_alone_names_the_signal(
    rank: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name, value in {"RANK": rank, "WORLD_SIZE": "4", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit, match="129"), Termination(at_once=True) as termination, peers.watched(termination):
        os.kill(os.getpid(), signal.SIGHUP)
    assert caplog.messages == (["SIGHUP: stopped before the first step"] if rank == "0" else [])


@pytest.mark.parametrize("at_once", [True, False])
@pytest.mark.parametrize("source", ["signal", "peer"])
def test_a_request_to_stop_reaches_all_ranks(
    source: str, at_once: bool, other: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    """The peer is told about this rank's signal. Before the first step the rank ends immediately with the peer's
    signal."""
    told = False
    with (
        pytest.raises(SystemExit, match="129") if at_once else nullcontext(),
        Termination(at_once) as termination,
        peers.watched(termination) as watch,
    ):
        watch.connect()
        if source == "signal":
            os.kill(os.getpid(), signal.SIGHUP)
        else:
            other.sendall(peers.MESSAGE.pack(peers.STOP, signal.SIGHUP))
        while at_once or not told:
            told |= peers.MESSAGE.unpack(other.recv(peers.MESSAGE.size)) == (peers.STOP, signal.SIGHUP)
    assert termination.received == signal.SIGHUP and str(termination) == "SIGHUP"
    said = [record.getMessage() for record in caplog.records]
    assert said == (["SIGHUP: stopped before the first step"] if at_once else [])
