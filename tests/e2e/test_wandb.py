"""Nothing about W&B stops a run or makes it hang; what it should have got lies on the disk."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from training_fixtures import ROOT, metrics


@pytest.mark.slow
@pytest.mark.parametrize("key", ["", "short", "a" * 40], ids=["nobody is logged in", "malformed", "no answer"])
def test_a_run_is_logged_offline(key: str, tmp_path: Path) -> None:
    """Three steps, with a server that takes the connection and never says a word. Every step is in W&B's form, too."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    (tmp_path / "home").mkdir()
    bare |= {"HOME": str(tmp_path / "home"), "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    with socket.create_server(("127.0.0.1", 0)) as server:
        given = {"WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}", "WANDB_API_KEY": key} if key else {}
        command = [sys.executable, "tests/wandb_run.py", str(tmp_path)]
        run = subprocess.run(command, cwd=ROOT, env=bare | given, text=True, capture_output=True, timeout=180)
    assert run.returncode == 0 and "this run is logged offline" in run.stderr, run.stderr[-3000:]
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb"))
