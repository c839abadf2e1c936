"""The lock of an output folder: one run writes to it at a time."""

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from longspec.errors import UserError

logger = logging.getLogger(__name__)

LOCK_NAME = ".lock"
UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)
"""Errors of file systems without locks."""


class FolderLock:
    """An exclusive `flock` on a file in an existing folder.

    The kernel releases it when the process ends, however it ends. On NFS it holds across hosts. The file is never
    removed, because a second run may already have opened it, and it names the holder. On a file system without locks a
    warning takes its place.
    """

    def __init__(self, folder: str | Path) -> None:
        """Raises UserError, and changes nothing, if another run holds the lock or the file cannot be written."""
        self.folder, self.token = Path(folder), secrets.token_hex(8)
        self.descriptor = self._acquired()
        os.register_at_fork(after_in_child=self.release)  # a loading process that outlives its rank must not hold it

    def _acquired(self) -> int:
        file = self.folder / LOCK_NAME
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"output_dir: {file} cannot be written ({error.strerror})") from error
        try:
            self._lock(descriptor)
        except UserError:
            os.close(descriptor)
            raise
        return descriptor

    def _lock(self, descriptor: int) -> None:
        file = self.folder / LOCK_NAME
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = _named(os.pread(descriptor, 4096, 0).decode(errors="replace"))
            raise UserError(
                f"output_dir: another run{holder} is writing to {self.folder}; wait for it, end it, or give another "
                "output_dir"
            ) from error
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise UserError(f"output_dir: {file} cannot be locked ({error.strerror})") from error
            logger.warning("%s cannot be locked (%s): start no second run there", file, error.strerror)
        holding = {"host": socket.gethostname(), "pid": os.getpid(), "token": self.token}
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holding).encode(), 0)
            os.fsync(descriptor)
        except OSError as error:
            raise UserError(f"output_dir: {file} cannot be written ({error.strerror})") from error

    def renew(self) -> None:
        """Before a save: lock the folder again if it was deleted. Raises UserError if another run holds it by now."""
        file = self.folder / LOCK_NAME
        with suppress(FileNotFoundError):
            if os.path.samestat(file.stat(), os.fstat(self.descriptor)):
                return
        logger.warning("%s was deleted during the run; this save makes it anew", self.folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"output_dir: {self.folder} cannot be made ({error.strerror})") from error
        before, self.descriptor = self.descriptor, self._acquired()
        os.close(before)

    def release(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@contextmanager
def locked(folder: str | Path) -> Iterator[None]:
    """Hold the FolderLock of an existing folder. Raises its UserErrors."""
    lock = FolderLock(folder)
    try:
        yield
    finally:
        lock.release()


def holder_token(folder: Path) -> str | None:
    """The token of the lock's last holder; None if this host sees none."""
    try:
        return str(json.loads((folder / LOCK_NAME).read_text())["token"])
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _named(holder: str) -> str:
    try:
        found = json.loads(holder)
        return f" (process {int(found['pid'])} on {str(found['host'])!r})"
    except (ValueError, LookupError, TypeError):
        return ""
