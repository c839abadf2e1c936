"""Training on two CPU ranks, by each launcher and on two hosts, as one plain loop trains."""

import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from training_fixtures import (
    LIMIT_S,
    ROOT,
    TINY,
    TRAINER,
    deepspeed_launch,
    error_line,
    launch,
    launch_environment,
    metrics,
    overrides_of,
    plain_training,
    tiny_config,
)

from longspec.models.draft_files import load_draft
from longspec.pipeline.processes import free_port


@pytest.mark.parametrize("start", [launch, pytest.param(deepspeed_launch, marks=pytest.mark.slow)])
def test_two_ranks_train_as_one_plain_loop_does(work: Path, tmp_path: Path, start: Callable[..., Any]) -> None:
    """Ranks, accumulation, uneven token counts, ZeRO-1, clipping and schedule change nothing but rounding."""
    more = ["variant=base", "max_steps=3", "max_grad_norm=0.3", "data.pack=false"]
    overrides = overrides_of(work, tmp_path / "out", *more)
    losses, weights = plain_training(tiny_config(*overrides), steps=3, ranks=2)
    result = start(TINY, *overrides)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-6000:]
    logged = metrics(tmp_path / "out")
    assert [line["step"] for line in logged] == [1, 2, 3]
    assert [line["loss"] for line in logged] == pytest.approx(losses, rel=1e-5)
    assert min(line["grad_norm"] for line in logged) > 0.3, "the clipping must be at work"
    draft = load_draft(tmp_path / "out" / "checkpoint-last")
    torch.testing.assert_close(draft, dict(weights), rtol=1e-4, atol=1e-6)


def test_a_mistake_on_the_launch_line_is_one_line_of_all_ranks() -> None:
    """The rank that knows the message must say it before any rank ends, for then the launcher ends them all."""
    assert "learning_rte" in error_line(launch(TINY, "learning_rte=1"))


@pytest.mark.slow
def test_training_on_two_hosts_is_that_of_one_plain_loop(work: Path, tmp_path: Path) -> None:
    """A rank that dies on the other host is a lost rank as on one host: tests/integration/test_replicas.py."""
    more = ["variant=base", "max_steps=2", "data.pack=false", "resume=latest"]
    arguments = overrides_of(work, tmp_path / "out", *more)
    losses, _ = plain_training(tiny_config(*arguments), steps=2, ranks=2)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc_per_node", "1"]
    torchrun += ["--rdzv_backend", "c10d", "--rdzv_id", "7", "--rdzv_endpoint", f"localhost:{free_port()}"]
    command = [*torchrun, TRAINER, "-cp", "conf/exp", "-cn", TINY, *arguments]
    how = {"cwd": ROOT, "env": launch_environment(PYTHONPATH=str(ROOT)), "stderr": subprocess.PIPE, "text": True}
    hosts = [subprocess.Popen(command, stdout=subprocess.DEVNULL, **how) for _ in range(2)]  # type: ignore[call-overload]
    errors = [host.communicate(timeout=LIMIT_S)[1] for host in hosts]
    assert [host.returncode for host in hosts] == [0, 0], errors
    assert [step["loss"] for step in metrics(tmp_path / "out")] == pytest.approx(losses, rel=1e-5)


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
