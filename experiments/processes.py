"""Child processes that are stopped when their context ends, and a port for their ranks."""

import socket
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

TIME_TO_SAVE_S = 60
"""Seconds that a stopped training launch has to save its last step."""


def free_port() -> int:
    """A TCP port that no process listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen]:
    """Start a process with the options of Popen. If it still runs at the end of the context, send SIGTERM and wait."""
    child = subprocess.Popen(command, **options)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait(TIME_TO_SAVE_S)
