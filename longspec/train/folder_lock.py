"""The lock of a run's output folder: one run writes there, and all of its ranks see the same folder."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from longspec.locks import FolderLock
from longspec.ranks.agreement import check_shared, from_rank_zero


@contextmanager
def sole_writer(output: Path) -> Iterator[Callable[[], None]]:
    """Lock the output folder on global rank 0 inside the context. Yields a function that all ranks call before a save.

    All ranks end with one error line if another run holds the lock, or if a rank sees a different folder under this
    path, as with disks that are local to each host.
    """
    locks: list[FolderLock] = []
    try:
        from_rank_zero(lambda: locks.append(FolderLock(output)))
        check_shared(output, "output_dir: ")
        yield lambda: from_rank_zero(lambda: locks[0].renew())
    finally:
        for lock in locks:
            lock.release()
