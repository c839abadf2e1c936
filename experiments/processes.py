"""Child processes that are stopped when their context ends."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

TIME_TO_SAVE_S = 60
"""Seconds that a stopped training launch has to save its last step."""


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
