"""The trainer's own command line, run and watched."""

import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from longspec.cli.train import ROOT
from longspec.cli.train import launch_line as trainer_line
from longspec.errors import UserError
from longspec.pipeline.processes import free_port, running

METRICS = "metrics.jsonl"
LAST_LINES = 15


def launch_line(config: str, overrides: dict[str, Any], ranks: int) -> list[str]:
    """The DeepSpeed command that trains `config` with these overrides on `ranks` ranks, on a free port."""
    launcher = ["--num_gpus", str(ranks), "--master_port", str(free_port())]
    return trainer_line(config, hydra_overrides(overrides), launcher)


def hydra_overrides(values: Mapping[str, Any]) -> list[str]:
    """Values of the trainer's configuration by full key, as arguments of its command line."""
    return [f"{key}={hydra_value(value)}" for key, value in values.items()]


def hydra_value(value: Any) -> str:
    """A value in the syntax of Hydra's overrides; strings are quoted."""
    if value is None:
        return "null"
    if isinstance(value, list):
        return "[" + ",".join(map(hydra_value, value)) + "]"
    if isinstance(value, str):
        return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
    return str(value)


def launch(command: list[str], folder: Path, steps: int) -> float:
    """Run a launch command and return its duration in seconds.

    Its output is appended to FOLDER/log.txt, and a progress bar counts its steps. Raises UserError with the end of the
    log if it fails.
    """
    environment = {"OMP_NUM_THREADS": "4"} | os.environ
    if not torch.cuda.is_available():
        environment.setdefault("DS_ACCELERATOR", "cpu")
    log, metrics = folder / "log.txt", folder / METRICS
    began = time.perf_counter()
    options = {"cwd": ROOT, "env": environment, "stderr": subprocess.STDOUT}
    bar = tqdm(total=steps, desc=str(folder.relative_to(folder.parents[1])), unit="step")
    with log.open("a") as output, running(command, stdout=output, **options) as child, bar:
        ended = False
        while not ended:
            ended = child.poll() is not None
            if metrics.exists() and (steps_done := metrics.read_bytes().count(b"\n")) > bar.n:
                bar.update(steps_done - bar.n)
            time.sleep(0.2)
    if child.returncode:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-LAST_LINES:])
        raise UserError(f"{folder}: training ended with code {child.returncode}; the last lines of {log}:\n{tail}")
    return time.perf_counter() - began
