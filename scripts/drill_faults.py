"""The faults of `make drill`, each applied to a live run, and the checks right after it."""

import json
import os
import random
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import psutil

from longspec.cli.train import ROOT, TRAINER
from longspec.train.generations import STATES, find_latest, is_whole
from longspec.train.logging import METRICS_NAME

CPU_RANKS = 2
START_LIMIT_S = 180
"""Seconds in which a run must come to a save."""
END_LIMIT_S = 60
"""Seconds in which all processes must end after a fault."""
SIGNALS: tuple[signal.Signals, ...] = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGKILL)


@dataclass(frozen=True)
class Live:
    """A run that is about to save."""

    launch: subprocess.Popen
    output: Path
    chance: random.Random

    @property
    def log(self) -> Path:
        return self.output.with_suffix(".log")

    def processes(self) -> list[psutil.Process]:
        return psutil.Process(self.launch.pid).children(recursive=True)

    def ranks(self) -> list[psutil.Process]:
        ranks = [process for process in self.processes() if is_rank(process)]
        assert len(ranks) == CPU_RANKS, f"{len(ranks)} ranks"
        return ranks

    def killed(self, target: Callable[[], object]) -> float:
        """Call `target`, which must end the run. Returns the seconds until all of its processes have ended."""
        processes, start = self.processes(), time.monotonic()
        target()
        with suppress(subprocess.TimeoutExpired):
            self.launch.wait(timeout=2 * END_LIMIT_S)
        # Ranks may outlive their launcher.
        psutil.wait_procs(processes, timeout=END_LIMIT_S)
        return time.monotonic() - start

    def kill(self) -> float:
        return self.killed(lambda: os.killpg(self.launch.pid, signal.SIGKILL))


def one_rank_killed(live: Live) -> float:
    return live.killed(live.chance.choice(live.ranks()).kill)


def full_disk(live: Live) -> float:
    """No file may grow beyond 200 kB, which stops a shard but neither the log nor the metrics."""

    def fill() -> None:
        for rank in live.ranks():
            rank.rlimit(psutil.RLIMIT_FSIZE, (200_000, 200_000))

    ended = live.killed(fill)
    assert live.launch.returncode == 2, f"exit code {live.launch.returncode} with a full disk"
    assert "could not be written" in live.log.read_text(), "the log does not name the full disk"
    return ended


def file_deleted(live: Live) -> float:
    return damaged(live, lambda file, _: file.unlink())


def file_truncated(live: Live) -> float:
    return damaged(live, lambda file, _: os.truncate(file, live.chance.randrange(file.stat().st_size)))


def file_swapped(live: Live) -> float:
    def swap(file: Path, other: Path) -> None:
        content = file.read_bytes()
        file.write_bytes(other.read_bytes())
        other.write_bytes(content)

    return damaged(live, swap)


def damaged(live: Live, damage: Callable[[Path, Path], object]) -> float:
    """Kill the run and damage its newest state: `damage` gets two of its shards. The older state must be used."""
    wait_until(lambda: is_whole(live.output / STATES[2]), live)
    ended = live.kill()
    latest = find_latest(live.output)
    assert latest is not None, "no checkpoint"
    file, other = live.chance.sample(sorted(latest[0].rglob("*_optim_states.pt")), CPU_RANKS)
    damage(file, other)
    assert find_latest(live.output) not in (None, latest), f"{file} is damaged, but its state is used"
    return ended


def signalled(live: Live) -> float:
    """Send a signal to a process of the launch. Every rank must end, and the last step must be saved."""
    launcher = psutil.Process(live.launch.pid)
    process = live.chance.choice([launcher, launcher.children()[0], *live.ranks()])
    number = live.chance.choice(SIGNALS[:3] if is_rank(process) else SIGNALS)
    ended = live.killed(lambda: process.send_signal(number))
    latest = find_latest(live.output)
    assert live.launch.poll() is not None, f"{number.name}: the launch continued"
    assert "stopped after step" in live.log.read_text(), f"{number.name}: the log does not say that the run stopped"
    assert latest is not None and latest[1].step == last_step(live.output), f"{number.name}: the last step is lost"
    return ended


KINDS: dict[str, tuple[Callable[[Live], float], int]] = {
    "all ranks killed": (Live.kill, 1),
    "file swapped": (file_swapped, 2),
    "one rank killed": (one_rank_killed, 1),
    "full disk": (full_disk, 1),
    "file deleted": (file_deleted, 2),
    "signal": (signalled, 0),
    "file truncated": (file_truncated, 2),
}
"""Each fault, which returns the seconds until the run has ended, and the number of saves that it may cost."""


def environment() -> dict[str, str]:
    paths = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    settings = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1", "WANDB_MODE": "disabled", "PYTHONPATH": paths}
    return os.environ | settings


def last_step(output: Path) -> int:
    """The last step that the run has logged, 0 if there is none."""
    metrics = output / METRICS_NAME
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    return json.loads(lines[-1])["step"] if lines else 0


def wait_until(condition: Callable[[], bool], live: Live) -> None:
    deadline = time.monotonic() + START_LIMIT_S
    while not condition():
        if live.launch.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"the run did not save in time; see {live.log}")
        time.sleep(0.005)


def is_rank(process: psutil.Process) -> bool:
    command = process.cmdline()
    return any(part.endswith(TRAINER) for part in command) and any("local_rank" in part for part in command[:5])
