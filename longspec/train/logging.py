"""What a run says while it goes: a line and a bar on the terminal, `metrics.jsonl`, Weights & Biases."""

import json
import logging
import os
import socket
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlparse

import datasets
import transformers
import wandb
from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from longspec.errors import first_line
from longspec.train.config import TrainConfig

logger = logging.getLogger(__name__)
METRICS_NAME = "metrics.jsonl"
WANDB_S = 60
"""How long W&B may take to begin, and to upload the rest at the end: its files stay for `wandb sync`."""


def setup_logging(rank: int) -> None:
    """Rank 0 reports what happens; the others only warn, with their rank on the line."""
    place = "" if rank == 0 else f"rank {rank} "
    logging.basicConfig(
        level=logging.WARNING,
        stream=sys.stderr,
        format=f"%(asctime)s {place}%(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    logging.getLogger("longspec").setLevel(logging.INFO if rank == 0 else logging.WARNING)
    # DeepSpeed calls collectives by names that torch is about to retire.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    if rank != 0:
        datasets.disable_progress_bars()
        transformers.utils.logging.disable_progress_bar()


class RunLog:
    """The log of one run, on global rank 0; on other ranks every method does nothing."""

    def __init__(self, config: TrainConfig, rank: int, start: int, total: int) -> None:
        """Steps up to `start` are kept in an existing metrics file; later ones belong to a run that was cut off."""
        self.active = rank == 0
        if not self.active:
            return
        folder = Path(config.output_dir)
        folder.mkdir(parents=True, exist_ok=True)
        self.file = _reopen(folder / METRICS_NAME, start)
        self.wandb = _start_wandb(folder, config)
        self.bar = tqdm(total=total, initial=start, unit="step", disable=None)
        self.total = total

    def step(self, metrics: dict[str, Any]) -> None:
        """Report one optimizer step; `metrics` holds `step` and plain numbers."""
        if not self.active:
            return
        self.file.write(json.dumps(metrics) + "\n")
        self.file.flush()
        self._tell_wandb(lambda: self.wandb.log(metrics, step=metrics["step"]))
        values = " ".join(f"{name} {value:.4g}" for name, value in metrics.items() if name != "step")
        with logging_redirect_tqdm():
            logger.info("step %d/%d %s", metrics["step"], self.total, values)
        self.bar.update()

    def close(self) -> None:
        if self.active:
            self.bar.close()
            self.file.close()
            self._tell_wandb(lambda: self.wandb.finish())

    def _tell_wandb(self, tell: Callable[[], object]) -> None:
        """W&B works in a process of its own, which a SIGTERM to all ends first; no step depends on it."""
        if self.wandb is None:
            return
        try:
            tell()
        except Exception as error:
            logger.warning("W&B is gone (%s); metrics.jsonl has every step", first_line(error))
            self.wandb = None


def _reopen(path: Path, last_step: int) -> Any:
    """`path` open for appending, without lines after `last_step` and without a line that was cut off."""
    kept: list[str] = []
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            if json.loads(line)["step"] > last_step:
                break
        except ValueError:
            break
        kept.append(line + "\n")
    path.write_text("".join(kept))
    return path.open("a")


def _start_wandb(folder: Path, config: TrainConfig) -> Any:
    mode: Any = os.environ.get("WANDB_MODE") or config.wandb.mode
    settings = wandb.Settings(console="off", silent=True, init_timeout=WANDB_S, finish_timeout=WANDB_S)
    arguments: dict[str, Any] = {"project": config.wandb.project, "name": folder.name, "dir": folder}
    arguments |= {"config": asdict(config), "settings": settings}
    try:
        return wandb.init(mode=_reachable_mode() if mode == "auto" else mode, **arguments)
    except (wandb.errors.CommError, wandb.errors.UsageError) as error:
        logger.warning("W&B: %s; this run is logged offline, in %s/wandb", error, folder)
        return wandb.init(mode="offline", **arguments)


def _reachable_mode() -> Literal["online", "offline"]:
    """online if somebody is logged in and the server answers, else offline, without a question or a long wait."""
    if not wandb.login(prompt=False, verify=False):
        logger.info("W&B: nobody is logged in, so this run is logged offline (`wandb login`, later `wandb sync`)")
        return "offline"
    address = urlparse(wandb.setup().settings.base_url)
    port = address.port or (443 if address.scheme == "https" else 80)
    try:
        socket.create_connection((str(address.hostname), port), timeout=5).close()
    except OSError as error:
        logger.warning("W&B: %s does not answer (%s), so this run is logged offline", address.hostname, error)
        return "offline"
    return "online"
