"""Faults that a run survives: kill -9, a rank that ends, a rank that does not answer, a loss of NaN.

Signals that ask a run to stop are the subject of tests/e2e/test_stopping.py.
"""

import json
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from training_fixtures import (
    LIMIT_S,
    ROOT,
    TINY,
    background,
    equal_drafts,
    error_line,
    launch,
    launch_environment,
    launched,
    metrics,
    overrides_of,
    timeless,
    wait_for_step,
)

from longspec.locks import LOCK_NAME
from longspec.models.draft_files import load_draft
from longspec.pipeline.processes import free_port
from longspec.train.checkpoint import read_draft
from longspec.train.generations import find_latest

pytestmark = pytest.mark.slow
STEPS = 12
FAULTY = "tests/faulty_run.py"


def overrides(work: Path, output: Path, *more: str) -> list[str]:
    """40 texts unpacked at 16 rows a step, so that an epoch ends inside a step."""
    return overrides_of(work, output, "data.pack=false", f"max_steps={STEPS}", "save_steps=4", *more)


def test_a_killed_run_goes_on_bit_for_bit(work: Path, tmp_path: Path) -> None:
    """kill -9 of everything after step 6, mostly inside an accumulation window, and another number of
    loading processes when it goes on: losses, rates, norms and the draft are those of the straight run."""
    straight, killed, log = tmp_path / "straight", tmp_path / "killed", tmp_path / "log"
    launched(TINY, *overrides(work, straight, "deepspeed=zero3"))
    with background(*overrides(work, killed, "deepspeed=zero3"), log=log):
        wait_for_step(killed, log, 6)
    assert 6 <= len(metrics(killed)) < STEPS
    resumed = overrides(work, killed, "deepspeed=zero3", "resume=latest", "data.num_workers=1")
    assert re.search(r"steps (5|9) … 12", launched(TINY, *resumed))
    assert timeless(killed) == timeless(straight)
    assert equal_drafts(straight / "checkpoint-last", killed / "checkpoint-last")
    saved, extracted = load_draft(killed / "checkpoint-last"), read_draft(killed / "last_ds")
    assert saved.keys() == extracted.keys() and all(torch.equal(saved[name], extracted[name]) for name in saved)


@pytest.mark.parametrize("fault", ["throws", pytest.param("dies", marks=pytest.mark.gpu)])
def test_a_rank_that_ends_ends_them_all(work: Path, fault: str, device: str, tmp_path: Path) -> None:
    """Over gloo the others hear of it where they wait; over NCCL they do not (see the last test, also for one that
    dies on a CPU)."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    began = time.monotonic()
    run = launch(TINY, *overrides(work, tmp_path), script=FAULTY, device=device, FAULT=fault)
    assert run.returncode != 0 and time.monotonic() - began < 100
    said = run.stderr + run.stdout
    assert fault != "throws" or "ValueError: this rank has had enough" in said, run.stderr[-3000:]
    assert len(metrics(tmp_path)) == 2


def test_a_loss_that_is_no_number_names_its_samples(work: Path, tmp_path: Path) -> None:
    """Those of the one micro-batch of the one rank whose loss it was, and nothing is saved after it."""
    error = error_line(launch(TINY, *overrides(work, tmp_path, "save_steps=2"), script=FAULTY, FAULT="nan"))
    assert "step 3: the loss is nan" in error
    samples = re.findall(r"texts\.jsonl:(\d+)", error)
    assert len(samples) == 4 and all(1 <= int(line) <= 40 for line in samples)
    found = find_latest(tmp_path)
    assert found is not None and found[1].step == 2


def test_an_output_folder_is_one_folder_for_all_ranks(work: Path, tmp_path: Path) -> None:
    """A launch is refused whose ranks see folders of their own."""
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    run = launch(TINY, *overrides(work, Path("out")), script=FAULTY, FAULT="local", DISKS=str(tmp_path))
    assert "output_dir: out is not one folder: rank 1 (on " in error_line(run)
    assert not (tmp_path / "1" / "out").exists() and [*(tmp_path / "0" / "out").iterdir()] == [
        tmp_path / "0" / "out" / LOCK_NAME
    ]


def test_drill(tmp_path: Path) -> None:
    """`make drill` with its first kind of trial."""
    drill = [sys.executable, "-m", "scripts.drill", "--trials", "1", "--output", str(tmp_path / "drill")]
    run = subprocess.run(drill, cwd=ROOT, env=launch_environment(), capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    trials = json.loads((tmp_path / "drill" / "summary.json").read_text())
    assert [(trial["zero_stage"], trial["kind"]) for trial in trials] == [(1, "all ranks killed")]


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
