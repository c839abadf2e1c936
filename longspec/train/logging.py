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

from longspec.errors import UserError, first_line
from longspec.train.config import TrainConfig
from longspec.train.seals import sync

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
        """Steps up to `start` are kept in an existing metrics file; later ones belong to a run that was cut off.

        The file of an earlier run is kept as `metrics-earlier-*.jsonl`. Raises UserError if it cannot be written.
        """
        self.active = rank == 0
        if not self.active:
            return
        folder = Path(config.output_dir)
        self.path, self.unwritten = folder / METRICS_NAME, b""
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self.last = _cut(self.path, start)
        except OSError as error:
            raise UserError(
                f"{self.path}: cannot be written ({error.strerror}); make room or mend the folder"
            ) from error
        self.wandb = _start_wandb(folder, config)
        self.bar = tqdm(total=total, initial=start, unit="step", disable=None)
        self.total = total

    def step(self, metrics: dict[str, Any]) -> None:
        """Report one optimizer step; `metrics` holds `step` and plain numbers."""
        if not self.active:
            return
        self._write(metrics)
        self._tell_wandb(lambda: self.wandb.log(metrics, step=metrics["step"]))
        values = " ".join(f"{name} {value:.4g}" for name, value in metrics.items() if name != "step")
        with logging_redirect_tqdm():
            logger.info("step %d/%d %s", metrics["step"], self.total, values)
        self.bar.update()

    def repeat(self, metrics: dict[str, Any]) -> None:
        """Add `metrics` to the step that the run resumed from, in a second line of it."""
        if not self.active:
            return
        self._write({**self.last, **metrics})
        self._tell_wandb(lambda: self.wandb.log(metrics, step=metrics["step"]))
        logger.info("step %d evaluated on resume: %s", metrics["step"], metrics)

    def close(self) -> None:
        if self.active:
            self.bar.close()
            self._tell_wandb(lambda: self.wandb.finish())

    def _write(self, metrics: dict[str, Any]) -> None:
        """Append a line. On a full disk lines wait for the next step: training goes on, and nothing written is lost."""
        full, self.unwritten = bool(self.unwritten), self.unwritten + json.dumps(metrics).encode() + b"\n"
        try:
            with self.path.open("ab", buffering=0) as file:
                while self.unwritten:
                    self.unwritten = self.unwritten[file.write(self.unwritten) :]
        except OSError as error:
            if not full:
                logger.warning("%s cannot be written (%s); its lines wait for the next step", self.path, error.strerror)

    def _tell_wandb(self, tell: Callable[[], object]) -> None:
        """W&B works in a process of its own, which a SIGTERM to all ends first; no step depends on it."""
        if self.wandb is None:
            return
        try:
            tell()
        except Exception as error:
            logger.warning("W&B is gone (%s); metrics.jsonl has every step", first_line(error))
            self.wandb = None


def _cut(path: Path, last_step: int) -> dict[str, Any]:
    """Drop lines after `last_step`, and one that was cut off, from the metrics file; its last line.

    The rest is written to a new file that replaces the old one, so a full disk leaves the old one. A run that starts
    at step 0 keeps the file of the run before under another name.
    """
    if not path.exists():
        return {}
    text = path.read_bytes()
    if text and not last_step:
        number = 1
        while (kept := path.with_name(f"{path.stem}-earlier-{number}{path.suffix}")).exists():
            number += 1
        path.rename(kept)
        return {}
    lines: list[bytes] = []
    last: dict[str, Any] = {}
    for line in text.splitlines(keepends=True):
        try:
            metrics = json.loads(line)
            if not line.endswith(b"\n") or metrics["step"] > last_step:
                break
        except (ValueError, LookupError, TypeError):
            break
        lines.append(line)
        last = metrics
    if sum(map(len, lines)) < len(text):
        unfinished = path.with_name(f"{path.name}.tmp")
        unfinished.write_bytes(b"".join(lines))
        sync(unfinished)
        unfinished.replace(path)
    return last


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
