"""What a rank that is stuck in a device call does when another one is gone, without a launcher that tells it."""

import subprocess
import sys

import pytest
from training_fixtures import ROOT, launch_environment

from scripts.pipeline.machine import free_port

RANKS = 3


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["dies", "throws"])
def test_ranks_that_hear_nothing_end_soon_after_one_that_is_gone(fault: str) -> None:
    """Each says who is gone and where it was itself; the one that throws ends, too, though its end is stuck."""
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS), "FAULT": fault}
    ranks = [
        subprocess.Popen(
            [sys.executable, "tests/stuck_run.py"],
            cwd=ROOT,
            env=launch_environment(RANK=str(rank), LOCAL_RANK=str(rank), **place),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(RANKS)
    ]
    try:
        said = [ranks[1].communicate(timeout=120)[1]]
        said[1:] = [ranks[rank].communicate(timeout=60)[1] for rank in (0, 2)]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode for rank in ranks)
    assert fault == "dies" or "ValueError: this rank has had enough" in said[0]
    for other in said[1:]:
        assert "rank 1 is gone" in other and "in wait_for_ever" in other, other
