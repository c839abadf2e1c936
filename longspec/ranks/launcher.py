"""The processes that started this rank, and whether they still run."""

import os
from itertools import pairwise

import psutil

LAUNCH = "deepspeed.launcher.launch"
"""Module of `launch.py`, as its command line names it."""
STARTED = "CROSS_RANK"
"""Environment variable that `launch.py` sets for its ranks."""


class Launcher:
    """DeepSpeed's `launch.py`, the parent of the ranks, and on a single host its parent, the `deepspeed` command.

    Both can be killed without a message to the ranks, because the command has no signal handlers. On several hosts a
    remote shell starts `launch.py`, and only `launch.py` is watched. A rank that was started otherwise watches nothing.
    """

    def __init__(self) -> None:
        process = psutil.Process()
        ancestry = [process, *process.parents()]
        commands = [_command(ancestor) for ancestor in ancestry]
        index = next((index for index, command in enumerate(commands) if LAUNCH in command), None)
        self._watched = [] if index is None else ancestry[: index + 1]
        """Child, parent, grandparent, … of which each must keep its parent."""
        self._was_gone = index is None and STARTED in os.environ
        if index is None or any(part.startswith("--node_rank") for part in commands[index]):
            return
        parent = index + 1
        if parent == len(ancestry) or os.getsid(ancestry[parent].pid) != os.getsid(ancestry[index].pid):
            # `launch.py` has been adopted, so the command has ended.
            self._was_gone = True
        elif "python" in os.path.basename(commands[parent][0]):
            # Other parents are shells, which may end before their jobs.
            self._watched.append(ancestry[parent])

    def is_gone(self) -> bool:
        """Whether one of the processes has ended. The operating system gives its children another parent."""
        try:
            return self._was_gone or any(child.ppid() != parent.pid for child, parent in pairwise(self._watched))
        except psutil.NoSuchProcess:
            return True


def _command(process: psutil.Process) -> list[str]:
    """The command line of a process; of one that cannot be read, an empty name."""
    try:
        return process.cmdline() or [""]
    except psutil.Error:
        return [""]
