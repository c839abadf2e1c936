"""The lock on a run's output folder: one run writes there, and all of its ranks see the same folder."""

import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from longspec.errors import UserError
from longspec.locks import FolderLock, holder_token
from longspec.train.distributed import from_every_rank, from_rank_zero


@contextmanager
def sole_writer(output: Path) -> Iterator[Callable[[], None]]:
    """Lock the output folder on global rank 0 while it is entered; yields what all ranks call before each save.

    One error line ends all ranks if another run holds the lock, or if a rank sees another folder under that path, as
    with disks that are local to each host.
    """
    held: list[FolderLock] = []

    def acquire() -> str:
        held.append(FolderLock(output))
        return held[0].token

    try:
        token = from_rank_zero(acquire)
        seen = from_every_rank((holder_token(output) == token, socket.gethostname()))

        def check() -> None:
            blind = [f"{rank} (on {host})" for rank, (sees, host) in enumerate(seen) if not sees]
            if blind:
                raise UserError(
                    f"output_dir: {output} is not one folder: rank {', '.join(blind)} does not see what "
                    "rank 0 writes there; give a path on a disk that all hosts share"
                )

        from_rank_zero(check)
        yield lambda: from_rank_zero(lambda: held[0].renew())
    finally:
        for lock in held:
            lock.release()
