"""The processes that `longspec draft` starts: their end, and the end of their parent."""

import subprocess
import sys
from pathlib import Path

import pytest

from longspec.errors import UserError
from longspec.pipeline.processes import launch, running

RANK = """
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path(sys.argv[1], "saved").touch()
    raise SystemExit
signal.signal(signal.SIGTERM, save)
print("started", flush=True)
time.sleep(60)
"""


def test_a_launch_that_is_interrupted_may_save(tmp_path: Path) -> None:
    line = [sys.executable, "-c", RANK, str(tmp_path)]
    with pytest.raises(KeyboardInterrupt), running(line, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout.readline() == "started\n"
        raise KeyboardInterrupt
    assert child.poll() == 0 and (tmp_path / "saved").exists()


def test_a_launch_that_fails_shows_the_end_of_its_log(tmp_path: Path) -> None:
    folder = tmp_path / "training" / "stage1"
    folder.mkdir(parents=True)
    (folder / "log.txt").write_text("an earlier run\n")
    with pytest.raises(UserError, match=r"(?s)ended with code 3.*what went wrong"):
        launch([sys.executable, "-c", "print('what went wrong'); raise SystemExit(3)"], folder, steps=4)
    assert (folder / "log.txt").read_text().startswith("an earlier run\n")
