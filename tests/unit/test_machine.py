"""Commands started by the demo's steps: exit codes, time limits, and the end of all child processes."""

import os
import sys
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from threading import Lock

import psutil
import pytest

from scripts.pipeline import machine
from scripts.pipeline.machine import CPU_RANKS, ROOT, TRAINER, CommandFailed, launch_line, run

RANK = """
import pathlib, signal, sys, time
def save(*_):
    time.sleep(1.5)
    pathlib.Path(sys.argv[1], "saved").write_text("yes")
    raise SystemExit
signal.signal(signal.SIGTERM, save)
pathlib.Path(sys.argv[1], "started").touch()
time.sleep(60)
"""
DEAF = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"
LAUNCHER = """
import subprocess, sys, time
for program in sys.argv[2:]:
    subprocess.Popen([sys.executable, "-c", program, sys.argv[1]])
time.sleep(60)
"""


def left_of(folder: Path) -> list[psutil.Process]:
    """Running processes with `folder` in their command line."""
    started = [one for one in psutil.process_iter(["cmdline"]) if str(folder) in (one.info["cmdline"] or [])]
    return [one for one in started if one.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_at_its_limit_a_command_is_told_to_stop_and_what_it_started_may_save(tmp_path: Path) -> None:
    """The launcher exits at once; its rank takes 1.5 s to save."""
    line = [sys.executable, "-c", LAUNCHER, str(tmp_path), RANK]
    assert not run(line, tmp_path / "log.txt", {}, limit_s=4)
    assert (tmp_path / "started").exists(), "the machine is too slow for this limit"
    assert (tmp_path / "saved").read_text() == "yes"
    assert not left_of(tmp_path)


@pytest.mark.slow
def test_nothing_outlives_the_time_to_save(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "TIME_TO_SAVE_S", 1)
    assert not run([sys.executable, "-c", LAUNCHER, str(tmp_path), DEAF], tmp_path / "log.txt", {}, limit_s=4)
    psutil.wait_procs(left_of(tmp_path), timeout=5)
    assert not left_of(tmp_path)


def test_a_command_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("an earlier run\n")
    with pytest.raises(CommandFailed, match=r"(?s)what went wrong.*ended with code 3"):
        run([sys.executable, "-c", "print('what went wrong'); raise SystemExit(3)"], tmp_path / "log.txt", {})
    assert (tmp_path / "log.txt").read_text().startswith("an earlier run\n")


def test_a_command_has_a_group_of_its_own_in_this_session(tmp_path: Path) -> None:
    """A signal to this process alone reaches the command through `run`, and the end of the session ends it."""
    told = "import os; print(os.getsid(0), os.getpgid(0) == os.getpid())"
    run([sys.executable, "-c", told], tmp_path / "log.txt", {})
    assert (tmp_path / "log.txt").read_text().split() == [str(os.getsid(0)), "True"]


def test_the_launcher_is_that_of_this_environment_wherever_its_command_lies(tmp_path: Path) -> None:
    line = launch_line(["--num_gpus", str(CPU_RANKS)], "an_experiment", {"max_steps": 3})
    assert line[:3] == [sys.executable, "-m", "deepspeed.launcher.runner"]
    assert line[line.index(TRAINER) :] == [
        TRAINER,
        "-cp",
        str(ROOT / "conf/exp"),
        "-cn",
        "an_experiment",
        "max_steps=3",
    ]


def test_a_command_that_ends_has_ended(tmp_path: Path) -> None:
    assert run([sys.executable, "-c", ""], tmp_path / "log.txt", {}, limit_s=60)


WAITING = """
import os, sys, time
print("ready", flush=True)
os.write(0, b".")
sys.stdin.readline()
print("begun", flush=True)
time.sleep(60)
"""


def test_a_command_gets_ready_at_once_and_begins_when_its_turn_is_there(tmp_path: Path) -> None:
    """The turn is held until the command ends a second later, and is released then."""
    turn, log = Lock(), tmp_path / "log.txt"
    with ThreadPoolExecutor(1) as pool:
        with turn:
            ended = pool.submit(run, [sys.executable, "-c", WAITING], log, {}, 1.0, turn)
            while "ready" not in (log.read_text() if log.exists() else "") and not ended.done():
                wait([ended], timeout=0.05)
            assert log.read_text().split() == ["ready"]
        while "begun" not in log.read_text() and not ended.done():
            wait([ended], timeout=0.05)
        assert turn.locked()
        assert ended.result() is False
    assert not turn.locked()


def test_a_turn_is_not_taken_for_a_command_that_is_not_ready(tmp_path: Path) -> None:
    """The time limit does not start either: the command ends by itself a second later."""
    turn, loading = Lock(), "import time; print('loading', flush=True); time.sleep(1)"
    log = tmp_path / "log.txt"
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(run, [sys.executable, "-c", loading], log, {}, 0.1, turn)
        while "loading" not in (log.read_text() if log.exists() else "") and not ended.done():
            wait([ended], timeout=0.05)
        assert not turn.locked()
        assert ended.result() is True
    assert not turn.locked()


def test_a_turn_is_given_back_by_a_command_that_fails_before_it_has_one(tmp_path: Path) -> None:
    turn = Lock()
    with pytest.raises(CommandFailed):
        run([sys.executable, "-c", "raise SystemExit(3)"], tmp_path / "log.txt", {}, turn=turn)
    assert not turn.locked()


def test_a_command_that_end_children_ended_has_failed_however_well_it_ended(tmp_path: Path) -> None:
    """A trainer that is stopped saves its state and exits with code 0, although its stage is incomplete."""
    saves = "import signal, time; signal.signal(signal.SIGTERM, lambda *_: exit(0)); print(flush=True); time.sleep(60)"
    log = tmp_path / "log.txt"
    with ThreadPoolExecutor(1) as pool:
        ended = pool.submit(run, [sys.executable, "-c", saves], log, {})
        while not (log.is_file() and log.read_text()):
            assert not ended.done()
        machine.end_children()
        with pytest.raises(CommandFailed, match="was stopped"):
            ended.result()
