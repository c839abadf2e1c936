"""Part files: the results of the ranks other than rank 0, next to the file into which rank 0 collects them."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import IO

from longspec.errors import UserError
from longspec.locks import UNSUPPORTED
from longspec.replacing import replacing


def part_path(file: Path, rank: int) -> Path:
    return file.with_name(f"{file.name}.rank-{rank}")


def part_paths(file: Path) -> list[Path]:
    """The part files of `file` that exist."""
    prefix = part_path(file, 0).name[:-1]
    try:
        return sorted(path for path in file.parent.iterdir() if path.name.startswith(prefix))
    except FileNotFoundError:
        return []


@contextmanager
def open_part(file: Path, rank: int) -> Iterator[IO[bytes]]:
    """A rank's part of `file`, opened for appending and locked until the context ends. Raises UserError."""
    with _locked(part_path(file, rank), "a+b") as stream:
        yield stream


@contextmanager
def all_parts(file: Path, wait: bool = False) -> Iterator[Sequence[IO[bytes]]]:
    """The parts of `file`, opened for reading and locked.

    If a rank still writes to one of them, as when rank 0 of a run was killed and the others go on, this raises
    UserError, or with `wait` it waits for the rank to close the file.
    """
    with ExitStack() as stack:
        yield [stack.enter_context(_locked(path, "rb", wait)) for path in part_paths(file)]


@contextmanager
def _locked(path: Path, mode: str, wait: bool = False) -> Iterator[IO[bytes]]:
    try:
        stream = path.open(mode)
    except OSError as error:
        raise UserError(f"{path}: cannot be opened ({error.strerror})") from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError as error:
            raise UserError(f"{path}: a rank of another run is writing to it; wait for it, or stop it") from error
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise UserError(f"{path}: cannot be locked ({error.strerror})") from error
        yield stream


def complete_lines(stream: IO[bytes]) -> Iterator[bytes]:
    """The lines of a file from its start, without an incomplete last one."""
    stream.seek(0)
    for raw in stream:
        if raw.endswith(b"\n"):
            yield raw


def write_in_order(file: Path, index_of: Sequence[int]) -> None:
    """Rewrite a file of complete lines atomically, in ascending order of `index_of` its lines. Raises OSError."""
    lines = file.read_bytes().split(b"\n")
    order = sorted(range(len(index_of)), key=index_of.__getitem__)
    with replacing(file) as unfinished:
        unfinished.write_bytes(b"".join(lines[number] + b"\n" for number in order))
