"""Launches on two ranks or hosts, as one plain loop trains; faults that a run survives. Signals: test_stopping.py."""

import json
import os
import re
import socket
import subprocess
import sys
import time
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
    background,
    deepspeed_launch,
    equal_drafts,
    error_line,
    launch,
    launch_environment,
    launched,
    metrics,
    overrides_of,
    plain_training,
    timeless,
    tiny_config,
    wait_for_step,
)

from longspec.locks import LOCK_NAME
from longspec.models.draft_files import load_draft
from longspec.pipeline.processes import free_port
from longspec.train.checkpoint import read_draft
from longspec.train.generations import find_latest


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
@pytest.mark.parametrize(
    ("key", "more"),
    [("", ()), ("", ("killed",)), ("short", ()), ("a" * 40, ())],
    ids=["nobody is logged in", "killed", "malformed", "no answer"],
)
def test_a_run_is_logged_offline(key: str, more: tuple[str, ...], tmp_path: Path) -> None:
    """Three steps, with a server that takes the connection and never says a word. Every step is in W&B's form, too."""
    bare = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    (tmp_path / "home").mkdir()
    bare |= {"HOME": str(tmp_path / "home"), "DS_ACCELERATOR": "cpu", "PYTHONPATH": str(ROOT)}
    with socket.create_server(("127.0.0.1", 0)) as server:
        given = {"WANDB_BASE_URL": f"http://127.0.0.1:{server.getsockname()[1]}", "WANDB_API_KEY": key} if key else {}
        command = [sys.executable, "tests/wandb_run.py", str(tmp_path), *more]
        run = subprocess.run(command, cwd=ROOT, env=bare | given, text=True, capture_output=True, timeout=180)
    assert run.returncode == 0 and "this run is logged offline" in run.stderr, run.stderr[-3000:]
    assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
    assert list((tmp_path / "wandb").glob("offline-run-*/*.wandb")) and "Traceback" not in run.stderr


STEPS = 12
FAULTY = "tests/faulty_run.py"


def overrides(work: Path, output: Path, *more: str) -> list[str]:
    """40 texts unpacked at 16 rows a step, so that an epoch ends inside a step."""
    return overrides_of(work, output, "data.pack=false", f"max_steps={STEPS}", "save_steps=4", *more)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["throws", pytest.param("dies", marks=pytest.mark.gpu)])
def test_a_rank_that_ends_ends_them_all(work: Path, fault: str, device: str, tmp_path: Path) -> None:
    """Over gloo the others hear of it where they wait, over NCCL not (see the last test, also for a death on a CPU)."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    began = time.monotonic()
    run = launch(TINY, *overrides(work, tmp_path), script=FAULTY, device=device, FAULT=fault)
    assert run.returncode != 0 and time.monotonic() - began < 100
    said = run.stderr + run.stdout
    assert fault != "throws" or "ValueError: this rank has had enough" in said, run.stderr[-3000:]
    assert len(metrics(tmp_path)) == 2


@pytest.mark.slow
def test_a_loss_that_is_no_number_names_its_samples(work: Path, tmp_path: Path) -> None:
    """Those of the one micro-batch of the one rank whose loss it was, and nothing is saved after it."""
    error = error_line(launch(TINY, *overrides(work, tmp_path, "save_steps=2"), script=FAULTY, FAULT="nan"))
    assert "step 3: the loss is nan" in error
    samples = re.findall(r"texts\.jsonl:(\d+)", error)
    assert len(samples) == 4 and all(1 <= int(line) <= 40 for line in samples)
    found = find_latest(tmp_path)
    assert found is not None and found[1].step == 2


@pytest.mark.slow
def test_an_output_folder_is_one_folder_for_all_ranks(work: Path, tmp_path: Path) -> None:
    """A launch is refused whose ranks see folders of their own."""
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    run = launch(TINY, *overrides(work, Path("out")), script=FAULTY, FAULT="local", DISKS=str(tmp_path))
    assert "output_dir: out is not one folder: rank 1 (on " in error_line(run)
    assert not (tmp_path / "1" / "out").exists()
    assert [path.name for path in (tmp_path / "0" / "out").iterdir()] == [LOCK_NAME]


@pytest.mark.slow
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
    """Each names the lost rank and prints its own stack. Before the others are started, the first rank says once that
    it waits for them."""
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
