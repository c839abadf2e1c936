"""Agreement between the ranks of a run: values from rank 0 or from every rank, and requests to stop."""

import logging
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from longspec.errors import UserError, first_line, os_errors
from longspec.signals import StopSignals

logger = logging.getLogger(__name__)
T = TypeVar("T")

WAIT_S = 10
"""Seconds after which a rank that waits for the others logs a warning."""
ALONE = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
"""The environment of a run without a launcher. Port 0 stands for any free port."""


def launched_ranks() -> tuple[int, int]:
    """This process's rank and the number of ranks by the environment; 0 and 1 without a launcher. Raises UserError."""
    rank, world_size = os.environ.get("RANK", "0"), os.environ.get("WORLD_SIZE", "1")
    is_launch = rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)
    # Defaults are for one process only; guessed values would make ranks wait for each other.
    if not is_launch or (int(world_size) > 1 and not {"RANK", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys()):
        raise UserError(
            f"environment variables: RANK is {rank!r} and WORLD_SIZE {world_size!r}, without what a launcher sets; "
            "start the run with `deepspeed` or `torchrun`, or unset them for a run on one device"
        )
    return int(rank), int(world_size)


@contextmanager
def connecting() -> Iterator[None]:
    """Context in which this rank joins the process group. Warns after WAIT_S seconds. Raises UserError if it cannot."""
    rank, world_size = launched_ranks()
    master = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
    warning = f"rank {rank} of {world_size} waits for the others; rank 0 is expected at {master}"
    # Connecting blocks without a word if one rank was started elsewhere or not at all.
    reminder = threading.Timer(WAIT_S, logger.warning, [warning])
    reminder.daemon = True
    reminder.start()
    try:
        yield
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise UserError(
            f"rank {rank} of {world_size} did not reach the others at {master}: {first_line(error)}"
        ) from error
    finally:
        reminder.cancel()


@cache
def waiting_group() -> Any:
    """A gloo group with a long timeout, because ranks wait here while rank 0 tokenizes a large corpus."""
    return dist.new_group(backend="gloo", timeout=timedelta(days=2))


def from_rank_zero(compute: Callable[[], T]) -> T:
    """The result of `compute()`, which runs on rank 0 only, on every rank. It is sent pickled.

    A UserError or SystemExit on rank 0 ends every rank with the same exit code, and the message is printed once.
    """
    return agreed_outcome(outcome_of(compute) if dist.get_rank() == 0 else None)


def outcome_of(compute: Callable[[], T]) -> T | SystemExit:
    """The result of `compute()`, or the exit that its UserError or SystemExit stands for."""
    try:
        return compute()
    except UserError as error:
        # Printed before other ranks hear of it: once one rank has ended, the launcher ends the others.
        print(f"error: {error}", file=sys.stderr)
        return SystemExit(2)
    except SystemExit as end:
        return SystemExit(end.code)


def agreed_outcome(outcome: Any) -> Any:
    """The outcome on rank 0, on every rank. Raises it if it is an exit."""
    message = [outcome]
    dist.broadcast_object_list(message, group=waiting_group())
    if isinstance(message[0], SystemExit):
        raise SystemExit(message[0].code)
    return message[0]


def fail_together(problem: str) -> None:
    """End all ranks with an error, which is printed once. All ranks call it."""

    def fail() -> None:
        raise UserError(problem)

    from_rank_zero(fail)


def from_every_rank(value: T) -> list[T]:
    """The `value` of each rank, in order of rank. It is sent pickled."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value, group=waiting_group())
    return values


def check_shared(folder: Path, label: str = "") -> None:
    """End all ranks with an error unless all of them see what rank 0 writes to a folder. label: precedes its name."""

    def write_mark() -> str:
        with os_errors(f"{label}{folder} cannot be written"):
            return Path(tempfile.mkdtemp(prefix=".shared-", dir=folder)).name

    mark = folder / from_rank_zero(write_mark)
    views = from_every_rank((mark.exists(), socket.gethostname()))
    others = [f"{rank} (on {host})" for rank, (sees_mark, host) in enumerate(views) if not sees_mark]

    from_rank_zero(mark.rmdir)
    if others:
        fail_together(
            f"{label}{folder} is not one folder: rank {', '.join(others)} does not see what rank 0 writes there; "
            "give a path on a disk that all hosts share"
        )


def attempt(build: Callable[[], T]) -> tuple[list[T], str | None]:
    """The result of `build()` in a list, or an empty list and the message of the UserError that it raised."""
    try:
        return [build()], None
    except UserError as error:
        return [], str(error)


class Termination(StopSignals):
    """A request to stop the run: a signal to any rank, or the end of the launcher.

    `longspec.ranks.peers` forwards it to all ranks. Before the first step it ends them immediately. During training
    each step calls `agreed`, so that all ranks stop after the same step.
    """

    _noticed_at: float | None = None

    def __str__(self) -> str:
        return self.cause or ("no signal" if self.received is None else signal.Signals(self.received).name)

    def agreed(self, patience_s: float = 0) -> bool:
        """Whether any rank has known of the request for at least `patience_s` seconds.

        A collective: all ranks must call it and get the same result. If it is true, `received` is the same on all, too.
        """
        if self.received is not None and self._noticed_at is None:
            self._noticed_at = time.monotonic()
        due = self._noticed_at is not None and time.monotonic() - self._noticed_at >= patience_s
        # The largest number wins, so that all ranks report the same signal.
        number = torch.tensor((self.received or 0) if due else 0)
        dist.all_reduce(number, dist.ReduceOp.MAX, group=waiting_group())
        if number:
            self.received = int(number)
        return bool(number)
