"""Commands that steps start: what their end means, and that none of them outlives its time."""

import sys
import time
from pathlib import Path

import psutil
import pytest

from scripts.pipeline.machine import CommandFailed, run

WORKS = """
import pathlib, signal, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
pathlib.Path(sys.argv[1], "child").write_text(str(child.pid))
def save(*_):
    pathlib.Path(sys.argv[1], "saved").write_text("yes")
    raise SystemExit
signal.signal(signal.SIGTERM, save)
time.sleep(60)
"""


def test_at_its_limit_a_command_is_asked_to_save_and_takes_its_children_along(tmp_path: Path) -> None:
    start = time.monotonic()
    ended = run([sys.executable, "-c", WORKS, str(tmp_path)], tmp_path / "log.txt", {}, limit_s=5)
    assert not ended and time.monotonic() - start < 30
    assert (tmp_path / "saved").read_text() == "yes"
    child = int((tmp_path / "child").read_text())
    assert not psutil.pid_exists(child) or psutil.Process(child).status() == psutil.STATUS_ZOMBIE


def test_a_command_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    (tmp_path / "log.txt").write_text("an earlier run\n")
    with pytest.raises(CommandFailed, match=r"(?s)what went wrong.*ended with code 3"):
        run([sys.executable, "-c", "print('what went wrong'); raise SystemExit(3)"], tmp_path / "log.txt", {})
    assert (tmp_path / "log.txt").read_text().startswith("an earlier run\n")


def test_a_command_that_ends_has_ended(tmp_path: Path) -> None:
    assert run([sys.executable, "-c", ""], tmp_path / "log.txt", {}, limit_s=60)
