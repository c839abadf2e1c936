"""The environment of a rank, its launchers, refused launches (one line each), and requests to stop."""

import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from longspec.errors import UserError
from longspec.inference.process_group import shared_target
from longspec.ranks import connections
from longspec.ranks.agreement import ALONE, Termination
from longspec.signals import STOP_SIGNALS, StopSignals, exit_code
from longspec.train.distributed import start_ranks

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ({"WORLD_SIZE": "2"}, "RANK is '0' and WORLD_SIZE '2', without what a launcher sets; start the run with"),
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE 'two'"),
        ({"RANK": "1"}, "RANK is '1' and WORLD_SIZE '1'"),
    ],
)
def test_an_environment_of_no_launch_is_one_line(
    given: dict[str, str], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ALONE:
        monkeypatch.delenv(name, raising=False)
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UserError, match=problem):
        start_ranks()


def test_a_port_in_use_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another run on the same host may use the port."""
    with socket.create_server(("0.0.0.0", 0)) as taken:
        port = taken.getsockname()[1]
        launch(monkeypatch, MASTER_PORT=str(port))
        with pytest.raises(UserError, match=f"rank 0 of 2 did not reach the others at 127.0.0.1:{port}: .*in use"):
            start_ranks()


RANK = """
import runpy, sys
launcher = runpy.run_path("longspec/ranks/launcher.py")["Launcher"]()
print(launcher.is_gone(), len(launcher._watched), flush=True)
sys.stdin.readline()
print(launcher.is_gone(), flush=True)
"""
PARENT = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[int(sys.argv[1]) :]).returncode)"


def parent(*arguments: str) -> list[str]:
    """A command that runs the following command as its child, with `arguments` on its own command line."""
    return [sys.executable, "-S", "-c", PARENT, str(2 + len(arguments)), *arguments]


@pytest.mark.parametrize(
    ("above", "watched", "told"),
    [
        ([*parent(), *parent("deepspeed.launcher.launch")], 3, True),  # the `deepspeed` command's
        ([*parent(), *parent("deepspeed.launcher.launch", "--node_rank=0")], 2, False),  # a remote shell's
        (["sh", "-c", '"$@"; exit $?', "sh", *parent("deepspeed.launcher.launch")], 2, False),  # run by hand
        ([*parent(), *parent()], 0, False),  # something else
    ],
)
def test_the_end_of_the_launcher_is_seen(above: list[str], watched: int, told: bool) -> None:
    """The outermost process is killed. Only the end of DeepSpeed's processes counts."""
    run = subprocess.Popen(
        [*above, sys.executable, "-c", RANK],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if name != "CROSS_RANK"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert run.stdin is not None and run.stdout is not None
    assert run.stdout.readline() == f"False {watched}\n"
    run.kill()
    run.wait()
    run.stdin.write("\n")
    run.stdin.flush()
    assert run.stdout.readline() == f"{told}\n"


LAUNCH = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}


def launch(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    for name, value in (LAUNCH | changes).items():
        monkeypatch.setenv(name, value)


@pytest.mark.parametrize(
    ("tp_size", "device", "gpus", "problem"),
    [
        (0, None, 0, "--tp_size: 0; it must be at least 1"),
        (3, "cpu", 0, "--tp_size 3: this launch has 2 processes"),
        (2, "cuda:1", 2, "--device cuda:1: each rank of --tp_size takes the GPU of its number"),
        (2, "cuda", 1, "--tp_size 2: 2 ranks on a machine with 1 GPUs"),
    ],
)
def test_a_launch_that_does_not_fit(
    tp_size: int, device: str | None, gpus: int, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    launch(monkeypatch)
    with pytest.raises(UserError, match=problem), shared_target(tp_size, device, StopSignals()):
        raise AssertionError("the context was entered")


def test_only_rank_zero_reports_it(monkeypatch: pytest.MonkeyPatch) -> None:
    launch(monkeypatch, RANK="1")
    with pytest.raises(SystemExit, match="2"), shared_target(3, "cpu", StopSignals()):
        raise AssertionError("the context was entered")


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


@pytest.mark.parametrize("number", STOP_SIGNALS)
def test_the_first_signal_is_noted_and_the_old_handlers_come_back(number: int) -> None:
    before = [signal.getsignal(one) for one in STOP_SIGNALS]
    with StopSignals() as stop:
        assert stop.received is None
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGTERM)
        assert stop.received == number
    assert [signal.getsignal(one) for one in STOP_SIGNALS] == before


def test_at_once_ends_on_the_first_signal_only() -> None:
    """A second signal must not interrupt the cleanup after the first one's SystemExit."""
    with StopSignals(at_once=True) as stop, pytest.raises(SystemExit) as end:
        try:
            signal.raise_signal(signal.SIGHUP)
        finally:
            signal.raise_signal(signal.SIGTERM)
            cleaned_up = True
    assert cleaned_up and end.value.code == exit_code(signal.SIGHUP) == 129 and stop.received == signal.SIGHUP


def test_a_signal_in_a_destructor_ends_the_command_too() -> None:
    """Python drops what a destructor raises; a server that starts would serve on."""
    dropped = type("Dropped", (), {"__del__": lambda self: signal.raise_signal(signal.SIGINT)})
    hook = sys.unraisablehook
    with pytest.raises(SystemExit, match="130"), StopSignals(at_once=True):
        dropped()
        threading.Event().wait(30)
    assert sys.unraisablehook is hook


def test_an_ignored_signal_stays_ignored() -> None:
    """`nohup` ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignals() as stop:
            signal.raise_signal(signal.SIGHUP)
        assert stop.received is None and signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_step_may_be_finished_for_a_while(one_rank: None) -> None:
    """`train_step` passes a patience inside a step and 0 before it."""
    termination = Termination()
    assert not termination.agreed() and not termination.agreed(0)
    termination.received = signal.SIGINT
    assert not termination.agreed(100) and termination.agreed()
    assert termination.received == signal.SIGINT


def test_a_second_sigint_kills() -> None:
    """The kernel kills the process, even while the main thread waits for a device."""
    with StopSignals() as stop:
        signal.raise_signal(signal.SIGINT)
        assert stop.received == signal.SIGINT and signal.getsignal(signal.SIGINT) is signal.SIG_DFL
