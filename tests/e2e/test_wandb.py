"""Nothing about W&B stops a run or makes it hang; what it should have got lies on the disk."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from training_fixtures import ROOT, metrics

pytestmark = pytest.mark.slow


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


@pytest.mark.parametrize("key", ["", "short", "a" * 40], ids=["nobody is logged in", "malformed", "no answer"])
def test_a_run_is_logged_offline(key: str, tmp_path: Path) -> None:
    """The server takes the connection and never says a word."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        given = {"WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}", "WANDB_API_KEY": key}
        assert "this run is logged offline" in logged(tmp_path, **given if key else {})
