"""The log of a run: lines and a progress bar on the terminal, `metrics.jsonl`, and Weights & Biases."""

import json
import logging
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import datasets
import transformers
import wandb
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from longspec.errors import first_line, os_errors
from longspec.replacing import replacing
from longspec.train.config_schema import TrainConfig
from longspec.train.generations import METRICS_NAME

logger = logging.getLogger(__name__)
WANDB_START_S = 30
"""Seconds that W&B may take to start."""
WANDB_S = 60
"""Seconds that W&B may take to finish its upload. Files that are not uploaded stay for `wandb sync`."""


def setup_logging(rank: int) -> None:
    """Configure Python's logging. Rank 0 logs at level INFO; the others log warnings, with their rank in the line."""
    form = "%(asctime)s %(message)s" if rank == 0 else f"%(asctime)s rank {rank} %(message)s"
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format=form, datefmt="%H:%M:%S", force=True)
    logging.getLogger("longspec").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    # DeepSpeed calls collectives by names that torch has deprecated.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    if rank != 0:
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()


class RunLog:
    """The log of one run on global rank 0. On other ranks every method does nothing."""

    def __init__(self, config: TrainConfig, rank: int, start_step: int, total_steps: int) -> None:
        """Open the metrics file (see `_cut`) and start W&B. Raises UserError if the file cannot be written."""
        self.active = rank == 0
        if not self.active:
            return
        folder = Path(config.output_dir)
        self.path = folder / METRICS_NAME
        with os_errors(f"{self.path}: cannot be written", "free space or repair the folder"):
            self.last_metrics = _cut(self.path, start_step)
        self.wandb = _start_wandb(folder, config)
        self.bar = tqdm(total=total_steps, initial=start_step, unit="step", disable=None)

    def step(self, metrics: dict[str, Any]) -> None:
        """Log one optimizer step. `metrics` holds `step` and plain numbers.

        Further metrics of the step from which the run resumed make a second line of that step. Training continues
        without a line that does not fit on the disk.
        """
        if not self.active:
            return
        if metrics["step"] == self.last_metrics.get("step"):
            metrics = self.last_metrics | metrics
        try:
            with self.path.open("a") as file:
                file.write(json.dumps(metrics) + "\n")
        except OSError as error:
            logger.warning("%s: step %d cannot be written (%s)", self.path, metrics["step"], error.strerror)
        self._tell_wandb(lambda: self.wandb.log(metrics, step=metrics["step"]))
        values = " ".join(f"{name} {value:.4g}" for name, value in metrics.items() if name != "step")
        # Lines would otherwise break the progress bar.
        with logging_redirect_tqdm():
            logger.info("step %d/%d %s", metrics["step"], self.bar.total, values)
        self.bar.update(metrics["step"] - self.bar.n)

    def close(self) -> None:
        """Finish the progress bar and W&B's upload."""
        if self.active:
            self.bar.close()
            self._tell_wandb(lambda: self.wandb.finish())
            if self.wandb is None:
                with suppress(Exception):  # which would be printed at the end of the process, below the last line
                    wandb.teardown()

    def _tell_wandb(self, tell: Callable[[], object]) -> None:
        """Call W&B, and stop using it after an error: a SIGTERM to the process group ends its own process early."""
        if self.wandb is None:
            return
        try:
            tell()
        except Exception as error:
            logger.warning("W&B is gone (%s); metrics.jsonl has every step", first_line(error))
            self.wandb = None


def logged_metrics(path: Path, last_step: int) -> list[dict[str, Any]]:
    """The metrics in a file up to `last_step`, without unreadable lines, as a kill or a full disk leaves them."""
    metrics = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        with suppress(ValueError, LookupError, TypeError):
            entry = json.loads(line)
            if entry["step"] <= last_step:
                metrics.append(entry)
    return metrics


def _cut(path: Path, last_step: int) -> dict[str, Any]:
    """Drop steps after `last_step`, which were lost with an unsaved state. Returns the last metrics left, or {}.

    A run that starts at step 0 renames the file of an earlier run to `metrics-earlier-*.jsonl` instead.
    """
    if not path.exists():
        return {}
    # A new run must not append to the metrics of another.
    if not last_step:
        names = (path.with_name(f"{path.stem}-earlier-{number}{path.suffix}") for number in count(1))
        path.rename(next(name for name in names if not name.exists()))
        return {}
    metrics = logged_metrics(path, last_step)
    with replacing(path) as unfinished:
        unfinished.write_text("".join(json.dumps(entry) + "\n" for entry in metrics))
    return metrics[-1] if metrics else {}


def _start_wandb(folder: Path, config: TrainConfig) -> Any:
    mode: Any = os.environ.get("WANDB_MODE") or config.wandb.mode
    settings = wandb.Settings(console="off", silent=True, init_timeout=WANDB_START_S, finish_timeout=WANDB_S)
    names: dict[str, Any] = {"project": config.wandb.project, "name": folder.name, "dir": folder}
    start = partial(wandb.init, **names, config=asdict(config), settings=settings)
    try:
        # Asks no question, and does not wait for the server.
        if mode == "auto" and not wandb.login(prompt=False, verify=False):
            logger.info("W&B: nobody is logged in, so this run is logged offline (`wandb login`, later `wandb sync`)")
            mode = "offline"
        return start(mode="online" if mode == "auto" else mode)
    except (wandb.errors.CommError, wandb.errors.UsageError) as error:
        logger.warning("W&B: %s; this run is logged offline, in %s/wandb", first_line(error), folder)
        return start(mode="offline")
