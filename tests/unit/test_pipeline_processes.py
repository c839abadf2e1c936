"""The processes that `longspec draft` starts: their end, and the end of their parent."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from longspec.errors import UserError
from longspec.pipeline.files import settings_file
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


def test_a_rank_that_waits_for_the_others_ends_with_its_launcher(tmp_path: Path) -> None:
    """Its launcher, which has put it into a session of its own as torchrun does, is killed."""
    settings = (Path(__file__).parents[1] / "tiny_draft.yaml").read_text()
    settings_file(tmp_path).write_text(settings.replace("target: ???", "target: none"))
    rank = [sys.executable, "-m", "longspec.pipeline", "write_share", str(tmp_path)]
    launcher = f"import subprocess; subprocess.Popen({rank}, start_new_session=True).wait()"
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(60)
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(server.getsockname()[1])}
        ranks = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2"}
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen([sys.executable, "-c", launcher], env=os.environ | place | ranks, **pipes) as process:
            waiting, _ = server.accept()
            with waiting:
                process.kill()
                # The pipe is open until the rank has ended, which gives up by itself after five minutes.
                process.communicate(timeout=60)
