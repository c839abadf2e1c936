"""The lock of a run's output folder: one run writes there, and all of its ranks see the same folder."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from longspec.errors import UserError
from longspec.locks import FolderLock, holder_token
from longspec.ranks.agreement import from_every_rank, from_rank_zero


@contextmanager
def sole_writer(output: Path) -> Iterator[Callable[[], None]]:
    """Lock the output folder on global rank 0 inside the context. Yields a function that all ranks call before a save.

    All ranks end with one error line if another run holds the lock, or if a rank sees a different folder under this
    path, as with disks that are local to each host.
    """
    locks: list[FolderLock] = []

    def acquire() -> str:
        locks.append(FolderLock(output))
        return locks[0].token

    def renew() -> None:
        from_rank_zero(lambda: locks[0].renew())

    try:
        token = from_rank_zero(acquire)
        # The lock file holds the token, so a rank that reads it sees the folder of rank 0.
        views = from_every_rank((holder_token(output) == token, socket.gethostname()))
        from_rank_zero(lambda: _check_shared(output, views))
        yield renew
    finally:
        for lock in locks:
            lock.release()


def _check_shared(output: Path, views: list[tuple[bool, str]]) -> None:
    """Raise UserError unless every rank sees the lock. views: per rank, whether it sees it, and its host."""
    others = [f"{rank} (on {host})" for rank, (sees_lock, host) in enumerate(views) if not sees_lock]
    if others:
        raise UserError(
            f"output_dir: {output} is not one folder: rank {', '.join(others)} does not see what rank 0 writes there; "
            "give a path on a disk that all hosts share"
        )
