"""Nothing about W&B stops a run or makes it hang; what it should have got lies on the disk."""

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from training_fixtures import ROOT, metrics

pytestmark = pytest.mark.slow


@pytest.fixture
def silent_server() -> Iterator[int]:
    """The port of one that lets everybody connect and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server.getsockname()[1]


def logged(output: Path, **environment: str) -> str:
    """What a run of three steps says, of which every step must be on the disk, in W&B's offline form, too."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    home = output / "home"
    home.mkdir()
    run = subprocess.run(
        [sys.executable, "tests/wandb_run.py", str(output)],
        cwd=ROOT,
        env={**bare, "HOME": str(home), "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT), **environment},
        text=True,
        capture_output=True,
        timeout=180,
    )
    assert run.returncode == 0, run.stderr[-3000:]
    assert [line["step"] for line in metrics(output)] == [1, 2, 3]
    assert list((output / "wandb").glob("offline-run-*/*.wandb"))
    return run.stderr


def test_nobody_is_logged_in(tmp_path: Path) -> None:
    assert "nobody is logged in, so this run is logged offline" in logged(tmp_path)


def test_the_server_takes_the_connection_and_never_answers(silent_server: int, tmp_path: Path) -> None:
    given = {"WANDB_BASE_URL": f"http://127.0.0.1:{silent_server}", "WANDB_API_KEY": "a" * 40}
    assert "this run is logged offline" in logged(tmp_path, **given)


def test_a_malformed_key(tmp_path: Path) -> None:
    assert "this run is logged offline" in logged(tmp_path, WANDB_API_KEY="short")
