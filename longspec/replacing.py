"""Files and folders that are written completely or not at all."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from longspec.errors import os_errors


@contextmanager
def replacing(path: Path, folder: bool = False) -> Iterator[Path]:
    """A new path next to `path`, which is renamed to `path` when the context ends.

    Other processes see the old content or the new one, also after a crash. If the context raises, `path` stays as it
    was and the new content is removed. A symbolic link is replaced, not followed; a pipe or a device is written
    directly. Raises OSError.

    folder: creates the new path as an empty folder. `path` must not exist then, and one process at a time may write it.
    """
    if path.exists() and not (path.is_file() or path.is_dir()):
        yield path
        return
    # Several processes may write a file; a killed one must not leave a large folder for ever.
    unfinished = path.with_name(f".{path.name}.unfinished" if folder else f".{path.name}.{os.getpid()}.unfinished")
    try:
        if folder:
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
        yield unfinished
        # After a power failure a renamed file could be empty otherwise.
        for file in unfinished.rglob("*") if folder else ():
            sync(file)
        sync(unfinished)
        unfinished.replace(path)
    finally:
        if folder:
            shutil.rmtree(unfinished, ignore_errors=True)
        else:
            unfinished.unlink(missing_ok=True)


def write_atomically(file: Path, content: str | bytes, make_folder: bool = False) -> None:
    """Write a file completely or not at all. Raises UserError.

    make_folder: whether its folder is created if needed. One that a run has locked must not be created again: the new
    folder has no lock.
    """
    with os_errors(f"{file}: cannot be written", "the same command continues once this is fixed"):
        if make_folder:
            file.parent.mkdir(parents=True, exist_ok=True)
        with replacing(file) as unfinished:
            unfinished.write_bytes(content.encode() if isinstance(content, str) else content)


def sync(path: Path) -> None:
    """Wait until a file or folder is on disk. Raises OSError."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
