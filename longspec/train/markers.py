"""The marker of a complete checkpoint folder: its files with their digests, its step and its run."""

import hashlib
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from errno import ENOENT
from pathlib import Path

from pydantic import TypeAdapter

from longspec.models.content import Digests
from longspec.replacing import replacing, sync

MARKER = "complete.json"
"""File name of the marker, the last file that a save writes."""


@dataclass(frozen=True)
class SavedFile:
    """Size in bytes and digest of a file."""

    bytes: int
    blake2b: str


@dataclass(frozen=True)
class Contents:
    """Digests of the files that a run reads, as lists of [name, digest]."""

    data: Digests = field(default_factory=list)
    held_out: Digests = field(default_factory=list)
    target: Digests = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """The identity of a run, kept when it is resumed."""

    id: str = ""
    contents: Contents = field(default_factory=Contents)


@dataclass(frozen=True)
class Marker:
    """Contents of a marker. `world_size` is the number of data-parallel ranks that saved."""

    step: int
    world_size: int
    run: Run = field(default_factory=Run)
    files: dict[str, SavedFile] = field(default_factory=dict)
    """The files of the checkpoint, by their paths relative to its folder."""


SCHEMA = TypeAdapter(Marker)


def write_marker(folder: Path, marker: Marker) -> None:
    """Write the marker, the last file of a complete checkpoint folder, once the other files are on disk."""
    paths = sorted(folder.rglob("*"))
    for path in paths:
        # A file is safe only once the folder that names it is on disk, too.
        sync(path)
    files = _describe(folder, [str(path.relative_to(folder)) for path in paths if path.is_file()])
    with replacing(folder / MARKER) as unfinished:
        unfinished.write_bytes(SCHEMA.dump_json(replace(marker, files=files)))
    sync(folder)


def is_whole(folder: Path) -> bool:
    """Whether `folder` has a marker, so that the save was finished. `damage` checks the files."""
    return (folder / MARKER).is_file()


def read_marker(folder: Path) -> Marker | None:
    """The marker of a folder; None if it is invalid. Raises OSError."""
    try:
        return SCHEMA.validate_json((folder / MARKER).read_bytes())
    except ValueError:
        return None


def damage(folder: Path) -> str | None:
    """A description of the first file in `folder` that differs from what was saved; None if there is none."""
    if not is_whole(folder):
        return f"{folder} was not saved whole (no {MARKER})"
    try:
        if (marker := read_marker(folder)) is None:
            return f"{folder / MARKER} is not a valid marker"
        current = _describe(folder, marker.files)
    except (OSError, ValueError) as error:  # a ValueError for a name with a null byte
        return f"{getattr(error, 'filename', None) or folder} cannot be read ({error})"
    changed = [name for name, file in marker.files.items() if current[name] != file]
    # Shards are found by their names, so a further one would be loaded.
    changed += {str(file.relative_to(folder)) for file in folder.rglob("*_states.pt")} - marker.files.keys()
    return f"{folder / changed[0]} is not the file that was saved" if changed else None


def _describe(folder: Path, names: Iterable[str]) -> dict[str, SavedFile]:
    def describe(name: str) -> tuple[str, SavedFile]:
        # A pipe would block. The marker may come from an untrusted source.
        if not (folder / name).is_file():
            raise FileNotFoundError(ENOENT, "no regular file", str(folder / name))
        with (folder / name).open("rb") as handle:
            size = os.fstat(handle.fileno()).st_size
            return name, SavedFile(size, hashlib.file_digest(handle, "blake2b").hexdigest())

    # Hashing releases the GIL.
    with ThreadPoolExecutor() as pool:
        return dict(pool.map(describe, names))
