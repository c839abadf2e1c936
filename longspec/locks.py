"""The lock of an output folder: one process writes to it at a time."""

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longspec.errors import UserError

LOCK_NAME = ".lock"


@contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Hold the lock of an existing folder. The kernel releases it when the process ends, however it ends.

    The lock file stays: removing it would let two processes lock two files of one name. Raises UserError, and leaves
    the folder as it is, if another process holds the lock or the folder cannot be written.
    """
    path = Path(folder) / LOCK_NAME
    try:
        handle = path.open("ab")
    except OSError as error:
        raise UserError(f"{folder}: cannot be written ({error.strerror})") from error
    with handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(f"{folder}: another run is writing here; wait for it or choose another folder") from error
        except OSError as error:
            raise UserError(f"{folder}: its file system does not support locks ({error.strerror})") from error
        yield
