"""Ranks blocked in a device call end when another rank is missing, dies or is stopped. No launcher is used."""

import subprocess
import sys

import pytest
from training_fixtures import LIMIT_S, ROOT, launch_environment

from longspec.pipeline.processes import free_port

RANKS = 3


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["dies", "stops"])
def test_ranks_that_hear_nothing_end_soon_after_one_that_is_lost(fault: str) -> None:
    """Each names the lost rank and prints its own stack.

    Before the others are started, the first rank says once that it waits for them.
    """
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS), "FAULT": fault}

    def start(rank: int) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "tests/stuck_run.py"],
            cwd=ROOT,
            env=launch_environment(RANK=str(rank), LOCAL_RANK=str(rank), **place),
            stderr=subprocess.PIPE,
            text=True,
        )

    ranks = [start(1)]
    try:
        assert ranks[0].stderr is not None
        waits = next(line for line in ranks[0].stderr if "waits for the others" in line)
        assert f"rank 0 is expected at 127.0.0.1:{place['MASTER_PORT']}" in waits
        ranks += [start(0), start(2)]
        said = [rank.communicate(timeout=LIMIT_S)[1] for rank in ranks[1:]]
        if fault == "stops":
            ranks[0].kill()
        said_by_lost = ranks[0].communicate(timeout=LIMIT_S)[1]
    finally:
        for rank in ranks:
            rank.kill()
    assert all(rank.returncode for rank in ranks)
    assert "waits for the others" not in said_by_lost
    how = "rank 1 does not answer" if fault == "stops" else "rank 1 is gone"
    for other in said:
        assert other.count(how) == 1 and "in wait_for_ever" in other, other
