"""What the steps run on, and the child processes that they start there."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from pathlib import Path

import psutil
import torch

ROOT = Path(__file__).resolve().parents[2]
TRAINER = "./trainer_base_ds_mul_fs_tp.py"
CPU_RANKS = 2
LAST_LINES = 25
TIME_TO_SAVE_S = 45
"""For a command that was told to stop. DeepSpeed's launcher leaves its ranks 30 s."""
_running: set[subprocess.Popen] = set()
_stopped: set[subprocess.Popen] = set()
"""Of those that ran, what `end_children` has ended."""


class CommandFailed(Exception):
    """A child process ended with an error; the message has the end of its log."""


def gpus() -> int:
    return torch.cuda.device_count()


def gpu_names() -> list[str]:
    """What DeepSpeed's launcher calls the GPUs that this process may use."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return named.split(",") if named and gpus() else [str(number) for number in range(gpus())]


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
    launcher = [sys.executable, "-m", "deepspeed.launcher.runner", *ranks, "--master_port", str(free_port())]
    return [*launcher, TRAINER, *configuration_line(experiment, overrides)]


def configuration_line(experiment: str, overrides: Mapping[str, object]) -> list[str]:
    """What the trainer is given."""
    given = (f"{key}={value}" for key, value in overrides.items())
    return ["-cp", str(ROOT / "conf/exp"), "-cn", experiment, *given]


def run(
    command: list[str],
    log: Path,
    environment: dict[str, str],
    limit_s: float | None = None,
    turn: AbstractContextManager[object] | None = None,
) -> bool:
    """Run a command in the repository's root, with its output added to `log`; whether it ended by itself.

    At `limit_s` seconds it gets SIGTERM, and some time to save what it has; so it does if this process is interrupted.
    With a `turn`, a lock, it starts at once, with a socket for stdin. When it has written a byte there, ready to begin,
    the lock is taken for it, held up to its end, and it is told by a line; the limit counts from there. Raises
    CommandFailed if `end_children` ended it, and, with the end of the log, if it ended with an error.
    """
    ours, theirs = socket.socketpair()
    with ours, theirs, log.open("a") as output:
        child = subprocess.Popen(
            command,
            cwd=ROOT,
            env=os.environ | environment,
            stdin=theirs.fileno() if turn else subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,  # of this session still: what ends that ends the command, too
        )
        _running.add(child)
        theirs.close()
        try:
            if turn:
                ours.recv(1)  # nothing, if it has ended
            with turn or nullcontext():
                try:
                    with suppress(BrokenPipeError):
                        ours.sendall(b"\n")
                    code = child.wait(limit_s)
                finally:
                    _end(child)
        except subprocess.TimeoutExpired:
            return False
        finally:
            _end(child)
            _running.discard(child)
    if child in _stopped:  # a trainer that was told to stop saves, and ends without an error
        _stopped.discard(child)
        raise CommandFailed(f"{' '.join(command[:4])} … was stopped")
    if code:
        end = log.read_text(errors="replace").splitlines()[-LAST_LINES:]
        raise CommandFailed("\n".join([*end, f"{' '.join(command[:4])} … ended with code {code}; all of it in {log}"]))
    return True


def end_children() -> None:
    """End the commands that other threads wait for: there they have failed, whatever they saved."""
    for child in list(_running):
        _stopped.add(child)
        _end(child)


def _end(child: subprocess.Popen) -> None:
    """SIGTERM to a command and all that it started, and after a while SIGKILL to what is left of them.

    A launcher may end long before its ranks have saved, so it is all of them that are waited for.
    """
    if child.poll() is not None:
        return
    with suppress(ProcessLookupError, psutil.NoSuchProcess):
        command = psutil.Process(child.pid)
        started = [command, *command.children(recursive=True)]
        os.killpg(child.pid, signal.SIGTERM)
        deadline = time.monotonic() + TIME_TO_SAVE_S
        while any(map(_works, started)) and time.monotonic() < deadline:
            time.sleep(0.1)
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


def _works(process: psutil.Process) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
