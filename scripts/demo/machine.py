"""What the demo runs on, and the child processes that it starts there."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
TRAINER = "./trainer_base_ds_mul_fs_tp.py"
CPU_RANKS = 2
LAST_LINES = 25


class CommandFailed(Exception):
    """A child process ended with an error; the message has the end of its log."""


def gpus() -> int:
    return torch.cuda.device_count()


def threads() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0))


def threads_a_rank() -> int:
    return max(1, threads() // CPU_RANKS)


def bf16_is_faster(size: int = 512, repeats: int = 20) -> bool:
    """Whether this machine multiplies bf16 matrices faster than fp32 ones; many CPUs only emulate it."""
    if gpus():
        return True
    seconds = {}
    for dtype in (torch.float32, torch.bfloat16):
        matrix = torch.ones(size, size, dtype=dtype)
        matrix @ matrix  # the first one sets up the kernel
        start = time.perf_counter()
        for _ in range(repeats):
            matrix @ matrix
        seconds[dtype] = time.perf_counter() - start
    return seconds[torch.bfloat16] < seconds[torch.float32]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def launch_line(ranks: Sequence[str], experiment: str, overrides: Mapping[str, object]) -> list[str]:
    """The launch line that trains every draft; ranks: DeepSpeed's options that say which."""
    deepspeed = str(Path(sys.executable).with_name("deepspeed"))  # this environment's
    command = [deepspeed, *ranks, "--master_port", str(free_port()), TRAINER, "-cp", "conf/exp/", "-cn", experiment]
    return [*command, *(f"{key}={value}" for key, value in overrides.items())]


def run(command: list[str], log: Path, environment: dict[str, str]) -> None:
    """Run a command in the repository's root, with its output in `log`. Raises CommandFailed."""
    with log.open("w") as output:
        code = subprocess.run(
            command, cwd=ROOT, env=os.environ | environment, stdout=output, stderr=subprocess.STDOUT
        ).returncode
    if code:
        end = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        raise CommandFailed("\n".join([*end, f"{' '.join(command[:4])} … ended with code {code}; all of it in {log}"]))
