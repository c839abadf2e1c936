"""Locks of output folders and files, so that one run at a time writes to them."""

import errno
import fcntl
import logging
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

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
    problem = f"output_dir: {file} cannot be written"
    with os_errors(problem):
        file.parent.mkdir(parents=True, exist_ok=True)
    refusal = f"output_dir: another run is writing to {folder}; wait for it, stop it, or give another output_dir"
    with _locked(file, problem, refusal):
        yield


def locked_file(path: Path) -> AbstractContextManager[None]:
    """Hold the lock of a file inside the context. Raises UserError if another process has locked it."""
    refusal = f"{path}: another run is writing to it; wait for it, or stop it"
    return _locked(path, f"{path}: cannot be opened", refusal)


@contextmanager
def _locked(file: Path, problem: str, refusal: str) -> Iterator[None]:
    """Hold the lock of a file. Raises UserError: `problem` if it cannot be opened, `refusal` if another process holds
    the lock. On a file system without locks a warning is logged instead."""
    with os_errors(problem):
        stream = file.open("ab")
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(refusal) from None
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise UserError(f"{file}: cannot be locked ({error.strerror})") from error
            logger.warning("%s cannot be locked (%s); do not start a second run there", file, error.strerror)
        # A loading process that outlives its rank must not hold the lock.
        os.register_at_fork(after_in_child=stream.close)
        yield
