"""Two hosts: two torchrun agents on this machine, which share nothing but the disk and a port."""

import subprocess
import sys
from pathlib import Path

import pytest
from training_fixtures import (
    LIMIT_S,
    ROOT,
    TINY,
    TRAINER,
    launch_environment,
    metrics,
    overrides_of,
    plain_training,
    tiny_config,
)

from longspec.pipeline.processes import free_port


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
