"""The processes that started this rank, and whether they still run."""

import os
from itertools import pairwise

import psutil

LAUNCH = "deepspeed.launcher.launch"
STARTED = "CROSS_RANK"


class Launcher:
    """DeepSpeed's `launch.py`, the parent of the ranks, and on one host its parent, `deepspeed` or `longspec train`.

    Both can be killed without a message to the ranks, because `deepspeed` has no signal handlers. On several hosts a
    remote shell starts `launch.py`, and only `launch.py` is watched. A rank that was started otherwise watches nothing.
    """

    def __init__(self) -> None:
        process = psutil.Process()
        ancestry = [process, *process.parents()]
        index = next((index for index, ancestor in enumerate(ancestry) if LAUNCH in _command(ancestor)), None)
        self._was_gone = index is None and STARTED in os.environ
        self._watched = [] if index is None else ancestry[: index + 1]
        """Child, parent, grandparent, … of which each must keep its parent."""
        if index is None or any(part.startswith("--node_rank") for part in _command(ancestry[index])):
            return
        launch, *parents = ancestry[index:]
        if not parents or _session(parents[0]) != _session(launch):
            # `launch.py` has been adopted, so the command has ended.
            self._was_gone = True
        elif "python" in os.path.basename(next(iter(_command(parents[0])), "")):
            # Other parents are shells, which may end before their jobs.
            self._watched.append(parents[0])

    def is_gone(self) -> bool:
        """Whether one of the processes has ended. The operating system gives its children another parent."""
        try:
            return self._was_gone or any(child.ppid() != parent.pid for child, parent in pairwise(self._watched))
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
