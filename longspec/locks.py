"""Locks of output folders and files, so that one run at a time writes to them."""

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from longspec.errors import UserError, os_errors

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"
"""Name of the lock file in the folder."""
UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""Error numbers of file systems without locks."""


@contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Hold the lock of a folder, which is created if needed, inside the context: an exclusive `flock` on a file in it.

    The kernel releases it when the process ends, even by a crash. On NFS it is effective across hosts. The file is
    never removed, because a second run may already have opened it. Raises UserError if another run holds the lock, and
    if the file cannot be written.
    """
    file = Path(folder) / LOCK_NAME
    with os_errors(f"output_dir: {file} cannot be written"):
        file.parent.mkdir(parents=True, exist_ok=True)
        stream = file.open("ab")
    with stream:
        if not _flock(stream, file):
            raise UserError(
                f"output_dir: another run is writing to {folder}; wait for it, stop it, or give another output_dir"
            )
        # A loading process that outlives its rank must not hold the lock.
        os.register_at_fork(after_in_child=stream.close)
        yield


@contextmanager
def locked_file(path: Path) -> Iterator[None]:
    """Hold the lock of a file inside the context. Raises UserError if another process has locked it."""
    with os_errors(f"{path}: cannot be opened"):
        stream = path.open("ab")
    with stream:
        if not _flock(stream, path):
            raise UserError(f"{path}: another run is writing to it; wait for it, or stop it")
        yield


def _flock(stream: IO[bytes], file: Path) -> bool:
    """Lock an open file. Returns whether it is locked; it is not if another process holds the lock.

    On a file system without locks a warning is logged instead. Raises UserError.
    """
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise UserError(f"{file}: cannot be locked ({error.strerror})") from error
        logger.warning("%s cannot be locked (%s); do not start a second run there", file, error.strerror)
    return True
