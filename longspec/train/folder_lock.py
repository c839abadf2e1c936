"""The lock on a run's output folder: one run writes there, and all of its ranks see the same folder."""

import errno
import fcntl
import json
import logging
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from longspec.errors import UserError
from longspec.train.distributed import from_every_rank, from_rank_zero

logger = logging.getLogger(__name__)

LOCK_NAME = "run.lock"
UNSUPPORTED = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


class FolderLock:
    """An exclusive `flock` on a file in the output folder, held by global rank 0.

    The system releases it with the process, however that ends. On NFS it holds across hosts. The file is never
    removed, as a second run might already have opened it, and it says who holds the lock.
    """

    def __init__(self, output: Path) -> None:
        """Raises UserError if another run holds the lock or the file cannot be written; changes nothing then."""
        self.output, self.token = output, secrets.token_hex(8)
        self.descriptor = self._acquired()
        os.register_at_fork(after_in_child=self.release)  # a loading process that outlives its rank must not hold it

    def _acquired(self) -> int:
        file = self.output / LOCK_NAME
        try:
            descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise UserError(f"config key output_dir: {file} cannot be written ({error.strerror})") from error
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            said = os.pread(descriptor, 4096, 0).decode(errors="replace")
            os.close(descriptor)
            raise UserError(
                f"config key output_dir: another run{_named(said)} is writing to {self.output}; wait for it, "
                "end it, or give another output_dir"
            ) from error
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                os.close(descriptor)
                raise UserError(f"config key output_dir: {file} cannot be locked ({error.strerror})") from error
            logger.warning("%s cannot be locked (%s): start no second run there", file, error.strerror)
        holder = {"host": socket.gethostname(), "pid": os.getpid(), "token": self.token}
        try:
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, json.dumps(holder).encode(), 0)
            os.fsync(descriptor)
        except OSError as error:
            os.close(descriptor)
            raise UserError(f"config key output_dir: {file} cannot be written ({error.strerror})") from error
        return descriptor

    def renew(self) -> None:
        """Before a save: lock the folder again if it was deleted. Raises UserError if another run holds it by now."""
        file = self.output / LOCK_NAME
        with suppress(FileNotFoundError):
            if os.path.samestat(file.stat(), os.fstat(self.descriptor)):
                return
        logger.warning("%s was deleted during the run; this save makes it anew", self.output)
        try:
            self.output.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"config key output_dir: {self.output} cannot be made ({error.strerror})") from error
        before, self.descriptor = self.descriptor, self._acquired()
        os.close(before)

    def release(self) -> None:
        descriptor, self.descriptor = self.descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


@contextmanager
def sole_writer(output: Path) -> Iterator[Callable[[], None]]:
    """Lock the output folder while it is entered, on all ranks; what they call together before each save.

    One error line ends all ranks if another run holds the lock, or if a rank sees another folder under that path, as
    with disks that are local to each host.
    """
    held: list[FolderLock] = []

    def acquire() -> str:
        held.append(FolderLock(output))
        return held[0].token

    try:
        token = from_rank_zero(acquire)
        seen = from_every_rank((_holder(output).get("token") == token, socket.gethostname()))

        def check() -> None:
            blind = [f"{rank} (on {host})" for rank, (sees, host) in enumerate(seen) if not sees]
            if blind:
                raise UserError(
                    f"config key output_dir: {output} is not one folder: rank {', '.join(blind)} does not see what "
                    "rank 0 writes there; give a path on a disk that all hosts share"
                )

        from_rank_zero(check)
        yield lambda: from_rank_zero(lambda: held[0].renew())
    finally:
        for lock in held:
            lock.release()


def _holder(output: Path) -> dict[str, object]:
    try:
        return dict(json.loads((output / LOCK_NAME).read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _named(holder: str) -> str:
    try:
        found = json.loads(holder)
        return f" (process {int(found['pid'])} on {str(found['host'])!r})"
    except (ValueError, LookupError, TypeError):
        return ""
