"""Child processes that end with their context or their parent, the processes that share the work of a step, and
launches of the trainer."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from longspec.cli.train import ROOT, trainer_line
from longspec.errors import UserError
from longspec.pipeline.settings import Settings
from longspec.ranks.agreement import ALONE
from longspec.ranks.replicas import Replicas
from longspec.signals import deferred_signals, end_with_parent
from longspec.train.config import quoted
from longspec.train.generations import METRICS_NAME

LAST_LINES = 15
TIME_TO_SAVE_S = 60
"""Seconds that a stopped training launch has to save its last step."""


def free_port() -> int:
    """A TCP port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen]:
    """Start a process (options of Popen). It gets SIGTERM when the context ends or, on Linux, this process."""
    child = None
    try:
        with deferred_signals():  # what a handler raises during a fork is lost
            child = subprocess.Popen(command, preexec_fn=end_with_parent, **options)
        yield child
    finally:
        if child is not None and child.poll() is None:
            child.terminate()
            child.wait(TIME_TO_SAVE_S)


def share_work(work: Callable[..., None], settings: Settings, root: Path, ranks: int, *names: str) -> None:
    """Call `work(settings, root, replicas, *names)` in `ranks` processes (see `__main__`), and wait for them.

    Their end frees the memory of the GPUs. A single process without a GPU is this one. Raises UserError if one fails.
    """
    if ranks == 1 and not torch.cuda.is_available():
        return work(settings, root, Replicas(), *names)
    launcher = ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", str(free_port())]
    own = ["-m", "longspec.pipeline", work.__name__, str(root), *names]
    with running([sys.executable, *(launcher if ranks > 1 else []), *own]) as child:
        if code := child.wait():
            raise UserError(
                f"{work.__name__} {' '.join(names)}: a process ended with code {code}; its message is above"
            )


def launch_line(config: str, overrides: dict[str, Any], ranks: int) -> list[str]:
    """The command that trains `config` with these overrides on `ranks` ranks: `longspec train`, on a free port. One
    rank needs no launcher, whose two processes import torch first."""
    arguments = hydra_overrides(overrides)
    if ranks == 1:
        return [sys.executable, "-u", *trainer_line(config, arguments)]
    options = ["--num_gpus", str(ranks), "--master_port", str(free_port())]
    return [sys.executable, "-m", "longspec", "train", *options, config, *arguments]


def hydra_overrides(values: Mapping[str, Any]) -> list[str]:
    """Values of the trainer's configuration by full key, as arguments of its command line."""
    overrides = []
    for key, value in values.items():
        if isinstance(value, dict) and value:
            overrides += hydra_overrides({f"{key}.{name}": own for name, own in value.items()})
        else:
            overrides.append(f"{key}={_hydra_value(value)}")
    return overrides


def _hydra_value(value: Any) -> str:
    """JSON, except for text, in which Hydra does not read JSON's escapes."""
    if isinstance(value, list):
        return f"[{','.join(map(_hydra_value, value))}]"
    if isinstance(value, str):
        return quoted(value)
    return json.dumps(value)


def launch(command: list[str], folder: Path, steps: int) -> float:
    """Run a launch command, with FOLDER/log.txt. Returns its seconds. Raises UserError with the log's last lines."""
    environment = {"OMP_NUM_THREADS": "4"} | os.environ | ALONE  # a launcher sets other values for its ranks
    if not torch.cuda.is_available():
        environment.setdefault("DS_ACCELERATOR", "cpu")
    log, metrics = folder / "log.txt", folder / METRICS_NAME
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
