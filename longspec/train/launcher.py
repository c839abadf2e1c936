"""Whether the processes that started this rank still run."""

import os
from itertools import pairwise

import psutil

LAUNCH = "deepspeed.launcher.launch"
STARTED = "CROSS_RANK"
"""Environment variable that `launch.py` sets for its ranks."""


class Launcher:
    """DeepSpeed's `launch.py`, the parent of the ranks, and on a single host the `deepspeed` command, its parent.

    They can be killed without the ranks being told: the command has no signal handlers. On several hosts `launch.py` is
    started by a remote shell and only it is watched. A rank that something else started has nothing to watch.
    """

    def __init__(self) -> None:
        process = psutil.Process()
        line = [process, *process.parents()]
        place = next((place for place, one in enumerate(line) if LAUNCH in _command(one)), None)
        self._line = [] if place is None else line[: place + 1]
        self._was_gone = place is None and STARTED in os.environ
        if place is None or any(part.startswith("--node_rank") for part in _command(line[place])):
            return
        above = line[place + 1] if place + 1 < len(line) else None
        if above is not None and _session(above) == _session(line[place]):
            if "python" in os.path.basename(next(iter(_command(above)), "")):  # no shell: it may end before its jobs
                self._line.append(above)
        else:
            self._was_gone = True  # `launch.py` has been adopted

    def is_gone(self) -> bool:
        """Whether one of these processes has ended; a child whose parent ends gets another one."""
        try:
            return self._was_gone or any(child.ppid() != parent.pid for child, parent in pairwise(self._line))
        except psutil.NoSuchProcess:
            return True


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def _session(process: psutil.Process) -> int | None:
    try:
        return os.getsid(process.pid)
    except OSError:
        return None
