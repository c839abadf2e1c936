"""Child processes that do not outlive their parent's work."""

import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

TIME_TO_SAVE_S = 60
"""For a training launch that is stopped to save its last step."""


@contextmanager
def running(command: Sequence[str], **options: Any) -> Iterator[subprocess.Popen]:
    """A process started with the options of Popen; if it still runs at the end, it gets SIGTERM and is waited for."""
    child = subprocess.Popen(command, **options)
    try:
        yield child
    finally:
        if child.poll() is None:
            child.terminate()
            child.wait(TIME_TO_SAVE_S)
