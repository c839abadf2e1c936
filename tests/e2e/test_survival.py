"""What a run survives, on the real launcher: kill -9, SIGTERM, a rank that ends, a loss of NaN, a full disk."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
import torch
from training_fixtures import (
    ROOT,
    TRAINER,
    launch,
    launch_environment,
    launch_line,
    launched,
    make_target,
    metrics,
    write_texts,
)

from longspec.locks import LOCK_NAME
from longspec.models.draft_files import load_draft
from longspec.train.generations import find_latest

pytestmark = pytest.mark.slow
EXPERIMENT = "tiny_glide_stage1_sinkpi-slicing"
SHOWN = ("step", "loss", "lr", "grad_norm", "tokens", "epoch")
STEPS = 20
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
    return [*given, "data.pack=false", f"output_dir={output}", f"max_steps={STEPS}", "save_steps=5", *more]


@contextmanager
def running(output: Path, *given: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A launch in the background that logs to `output`.log; nothing of it is left behind."""
    with output.with_suffix(".log").open("w") as log:
        run = subprocess.Popen(
            launch_line(EXPERIMENT, *given),
            cwd=ROOT,
            env=launch_environment(**environment),
            stdout=log,
            stderr=log,
            text=True,
            start_new_session=True,
        )
        try:
            yield run
        finally:
            with suppress(ProcessLookupError):
                os.killpg(run.pid, signal.SIGKILL)
            run.wait()


def wait_for_step(run: subprocess.Popen[str], output: Path, step: int) -> None:
    deadline = time.monotonic() + 180
    while not (output / "metrics.jsonl").exists() or len(metrics(output)) < step:
        assert run.poll() is None and time.monotonic() < deadline, output.with_suffix(".log").read_text()[-3000:]
        time.sleep(0.01)


def shown(output: Path) -> list[list[float]]:
    return [[line[name] for name in SHOWN] for line in metrics(output)]


@pytest.mark.parametrize("zero", ["zero1", "zero3"])
def test_a_killed_run_goes_on_bit_for_bit(work: Path, zero: str, tmp_path: Path) -> None:
    """kill -9 of everything between steps 12 and 15, mostly inside an accumulation window, and another number of
    loading processes when it goes on: losses, rates, norms and the draft are those of the straight run."""
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    launched(EXPERIMENT, *overrides(work, straight, f"deepspeed={zero}"))
    with running(killed, *overrides(work, killed, f"deepspeed={zero}")) as run:
        wait_for_step(run, killed, 12)
    assert 12 <= len(metrics(killed)) < STEPS
    said = launched(EXPERIMENT, *overrides(work, killed, f"deepspeed={zero}", "resume=latest", "data.num_workers=1"))
    assert re.search(r"steps (11|16) … 20", said)
    assert shown(killed) == shown(straight)
    drafts = [load_draft(output / "checkpoint-last") for output in (straight, killed)]
    assert all(torch.equal(weight, drafts[1][name]) for name, weight in drafts[0].items())


def test_sigterm_saves_the_last_step_and_ends_cleanly(work: Path, tmp_path: Path) -> None:
    """Within the launcher's 30 seconds, loading processes, W&B and all; the run then goes on from there.

    It is sent to `deepspeed.launcher.launch`, the command's one child; tests/e2e/test_stopping.py has the others.
    """
    output = tmp_path / "out"
    endless = overrides(work, output, "max_steps=100000", "save_steps=100000", "data.num_workers=1")
    with running(output, *endless, WANDB_MODE="offline") as run:
        wait_for_step(run, output, 3)
        processes = psutil.Process(run.pid).children(recursive=True)
        began = time.monotonic()
        psutil.Process(run.pid).children()[0].terminate()
        run.wait(timeout=60)
        psutil.wait_procs(processes, timeout=30)
        assert time.monotonic() - began < 25
    said = output.with_suffix(".log").read_text()
    stopped = re.search(r"SIGTERM: stopped after step (\d+)", said)
    # W&B's process is ended too, and its own hook complains of that at the very end.
    ours = said.partition("Exception ignored in atexit callback")[0]
    assert stopped and "Traceback" not in ours, said[-3000:]
    found = find_latest(output)
    assert found is not None and found[1].step == int(stopped[1]) == len(metrics(output))
    more = f"max_steps={found[1].step + 1}"
    assert f"steps {found[1].step + 1} …" in launched(EXPERIMENT, *endless, "resume=latest", more)


@pytest.mark.parametrize(
    ("fault", "sign"), [("throws", "ValueError: this rank has had enough"), ("dies", "exits with")]
)
def test_a_rank_that_ends_ends_them_all(work: Path, fault: str, sign: str, device: str, tmp_path: Path) -> None:
    """Over gloo the others hear of it where they wait; over NCCL they do not (see tests/e2e/test_peers.py)."""
    if device == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("needs 2 GPUs")
    began = time.monotonic()
    run = launch(EXPERIMENT, *overrides(work, tmp_path), script=FAULTY, device=device, FAULT=fault)
    assert run.returncode != 0 and time.monotonic() - began < 100
    assert sign in run.stderr + run.stdout, run.stderr[-3000:]
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


def test_a_full_disk_keeps_the_older_checkpoint(work: Path, tmp_path: Path) -> None:
    """Files may not grow past 20 kB from the second save on."""
    run = launch(EXPERIMENT, *overrides(work, tmp_path, "save_steps=2"), script=FAULTY, FAULT="full")
    errors = [line for line in run.stderr.splitlines() if line.startswith("error:")]
    assert run.returncode == 2 and errors, run.stderr[-3000:]
    assert all("the checkpoint of step 4 could not be written" in line for line in errors)
    found = find_latest(tmp_path)
    assert found is not None and found[1].step == 2
    assert "steps 3 … 4" in launched(EXPERIMENT, *overrides(work, tmp_path, "resume=latest", "max_steps=4"))


def test_an_output_folder_has_one_writer_and_is_one_folder(work: Path, tmp_path: Path) -> None:
    """A second launch is refused while the first one runs, and so is one whose ranks see folders of their own."""

    def refused(*given: str, script: str = TRAINER, **environment: str) -> str:
        second = launch(EXPERIMENT, *given, script=script, **environment)
        errors = [line for line in second.stderr.splitlines() if line.startswith("error:")]
        assert second.returncode == 2 and len(errors) == 1 and "Traceback" not in second.stderr, second.stderr[-3000:]
        return errors[0]

    output = tmp_path / "out"
    endless = overrides(work, output, "max_steps=100000", "save_steps=2")
    with running(output, *endless) as run:
        wait_for_step(run, output, 2)
        assert f"is writing to {output}" in refused(*endless, "seed=7")
        wait_for_step(run, output, len(metrics(output)) + 2)
    assert "Traceback" not in output.with_suffix(".log").read_text()
    found = find_latest(output)
    assert found is not None and found[1].step >= 2
    for rank in ("0", "1"):
        (tmp_path / rank).mkdir()
    said = refused(*overrides(work, Path("out")), script=FAULTY, FAULT="local", DISKS=str(tmp_path))
    assert "output_dir: out is not one folder: rank 1 (on " in said
    assert not (tmp_path / "1" / "out").exists() and [*(tmp_path / "0" / "out").iterdir()] == [
        tmp_path / "0" / "out" / LOCK_NAME
    ]


def test_drill(tmp_path: Path) -> None:
    """`make drill` with a trial of each of the first kinds under both ZeRO stages."""
    drill = [sys.executable, "-m", "scripts.drill", "--trials", "4", "--output", str(tmp_path / "drill")]
    run = subprocess.run(drill, cwd=ROOT, env=launch_environment(), capture_output=True, text=True, timeout=900)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]
    trials = json.loads((tmp_path / "drill" / "summary.json").read_text())
    assert {(trial["zero_stage"], trial["kind"]) for trial in trials} == {
        (stage, kind) for stage in (1, 3) for kind in ("all ranks killed", "file swapped")
    }
