"""The environment of a rank, and the processes that launched it. Each error is one line."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from longspec.errors import UserError
from longspec.ranks.agreement import ALONE
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
        environment = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in environment.items():
            monkeypatch.setenv(name, str(value))
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
