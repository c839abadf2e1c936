"""Child processes that end with their context or their parent, and the processes that share the work of a step."""

import ctypes
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from longspec.errors import UserError
from longspec.pipeline.settings import Settings
from longspec.ranks.replicas import Replicas

TIME_TO_SAVE_S = 60
"""Seconds that a stopped training launch has to save its last step."""
PARENT_DEATH_SIGNAL = 1
"""Linux's number of the request for a signal when the parent ends."""


def free_port() -> int:
    """A TCP port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen]:
    """Start a process with the options of Popen. If it still runs at the end of the context, send SIGTERM and wait.

    On Linux it also gets SIGTERM when this process is killed.
    """
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    end_with_parent = None if libc is None else lambda: libc.prctl(PARENT_DEATH_SIGNAL, signal.SIGTERM)
    child = subprocess.Popen(command, preexec_fn=end_with_parent, **options)
    try:
        yield child
    finally:
        if child.poll() is None:
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
