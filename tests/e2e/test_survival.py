"""Faults that a run survives: kill -9, a rank that ends, a loss of NaN.

Signals that ask a run to stop are the subject of tests/e2e/test_stopping.py.
"""

import json
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from forked_ranks import Rank, kill
from training_fixtures import (
    ROOT,
    launch,
    launch_environment,
    launched,
    make_target,
    metrics,
    start_ranks_of,
    write_texts,
)

from longspec.locks import LOCK_NAME
from longspec.models.draft_files import load_draft
from longspec.train.generations import find_latest

pytestmark = pytest.mark.slow
EXPERIMENT = "tiny_glide_stage1_sinkpi-slicing"
SHOWN = ("step", "loss", "lr", "grad_norm", "tokens", "epoch")
STEPS = 12
FAULTY = "tests/faulty_run.py"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Target and texts; 40 texts unpacked at 16 rows a step, so that an epoch ends inside a step."""
    work = tmp_path_factory.mktemp("survival")
    make_target(work / "target")
    write_texts(work / "texts.jsonl")
    return work


def overrides(work: Path, output: Path, *more: str) -> list[str]:
    given = [f"model_name_or_path={work}/target", f"data.files={work}/texts.jsonl", f"data.cache_dir={work}/cache"]
    return [*given, "data.pack=false", f"output_dir={output}", f"max_steps={STEPS}", "save_steps=4", *more]


@contextmanager
def running(output: Path, *given: str) -> Iterator[list[Rank]]:
    """Two ranks in the background that log to `output`.log; they are killed (kill -9) in the end."""
    ranks = start_ranks_of(EXPERIMENT, *given, log=output.with_suffix(".log"))
    try:
        yield ranks
    finally:
        kill(ranks)


def wait_for_step(ranks: list[Rank], output: Path, step: int) -> None:
    deadline = time.monotonic() + 180
    while not (output / "metrics.jsonl").exists() or len(metrics(output)) < step:
        alive = all(rank.is_alive() for rank in ranks)
        assert alive and time.monotonic() < deadline, output.with_suffix(".log").read_text()[-3000:]
        time.sleep(0.01)


def shown(output: Path) -> list[list[float]]:
    return [[line[name] for name in SHOWN] for line in metrics(output)]


def test_a_killed_run_goes_on_bit_for_bit(work: Path, tmp_path: Path) -> None:
    """kill -9 of everything after step 6, mostly inside an accumulation window, and another number of
    loading processes when it goes on: losses, rates, norms and the draft are those of the straight run."""
    straight, killed, zero = tmp_path / "straight", tmp_path / "killed", "deepspeed=zero3"
    launched(EXPERIMENT, *overrides(work, straight, zero))
    with running(killed, *overrides(work, killed, zero)) as ranks:
        wait_for_step(ranks, killed, 6)
    assert 6 <= len(metrics(killed)) < STEPS
    said = launched(EXPERIMENT, *overrides(work, killed, zero, "resume=latest", "data.num_workers=1"))
    assert re.search(r"steps (5|9) … 12", said)
    assert shown(killed) == shown(straight)
    drafts = [load_draft(output / "checkpoint-last") for output in (straight, killed)]
    assert all(torch.equal(weight, drafts[1][name]) for name, weight in drafts[0].items())


@pytest.mark.parametrize("fault", ["throws", pytest.param("dies", marks=pytest.mark.gpu)])
def test_a_rank_that_ends_ends_them_all(work: Path, fault: str, device: str, tmp_path: Path) -> None:
    """Over gloo the others hear of it where they wait; over NCCL they do not (see tests/e2e/test_peers.py, also for one
    that dies on a CPU)."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    began = time.monotonic()
    run = launch(EXPERIMENT, *overrides(work, tmp_path), script=FAULTY, device=device, FAULT=fault)
    assert run.returncode != 0 and time.monotonic() - began < 100
    said = run.stderr + run.stdout
    assert fault != "throws" or "ValueError: this rank has had enough" in said, run.stderr[-3000:]
    assert len(metrics(tmp_path)) == 2


def test_a_loss_that_is_no_number_names_its_samples(work: Path, tmp_path: Path) -> None:
    """Those of the one micro-batch of the one rank whose loss it was, and nothing is saved after it."""
    run = launch(EXPERIMENT, *overrides(work, tmp_path, "save_steps=2"), script=FAULTY, FAULT="nan")
    errors = [line for line in run.stderr.splitlines() if line.startswith("error:")]
    assert run.returncode == 2 and len(errors) == 1, run.stderr[-3000:]
    assert "step 3: the loss is nan" in errors[0] and "Traceback" not in run.stderr
    samples = re.findall(r"texts\.jsonl:(\d+)", errors[0])
    assert len(samples) == 4 and all(1 <= int(line) <= 40 for line in samples)
    found = find_latest(tmp_path)
    assert found is not None and found[1].step == 2


def test_an_output_folder_is_one_folder_for_all_ranks(work: Path, tmp_path: Path) -> None:
    """A launch is refused whose ranks see folders of their own."""
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    run = launch(EXPERIMENT, *overrides(work, Path("out")), script=FAULTY, FAULT="local", DISKS=str(tmp_path))
    errors = [line for line in run.stderr.splitlines() if line.startswith("error:")]
    assert run.returncode == 2 and len(errors) == 1 and "Traceback" not in run.stderr, run.stderr[-3000:]
    assert "output_dir: out is not one folder: rank 1 (on " in errors[0]
    assert not (tmp_path / "1" / "out").exists() and [*(tmp_path / "0" / "out").iterdir()] == [
        tmp_path / "0" / "out" / LOCK_NAME
    ]


def test_drill(tmp_path: Path) -> None:
    """`make drill` with its first kind of trial under both ZeRO stages."""
    drill = [sys.executable, "-m", "scripts.drill", "--trials", "2", "--output", str(tmp_path / "drill")]
    run = subprocess.run(drill, cwd=ROOT, env=launch_environment(), capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    trials = json.loads((tmp_path / "drill" / "summary.json").read_text())
    assert [(trial["zero_stage"], trial["kind"]) for trial in trials] == [
        (1, "all ranks killed"),
        (3, "all ranks killed"),
    ]
