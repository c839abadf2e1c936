"""The marker of a complete checkpoint folder: its files with their digests, its progress and its run."""

import hashlib
import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath

from pydantic import TypeAdapter

from longspec.replacing import replacing, sync
from longspec.train.contents import Contents

MARKER = "complete.json"
"""File name of the marker, the last file that a save writes."""


@dataclass(frozen=True)
class SavedFile:
    """Size in bytes and digest of a file."""

    bytes: int
    blake2b: str


Files = dict[str, SavedFile]
"""The files of a checkpoint, by their paths relative to its folder."""


@dataclass(frozen=True)
class Progress:
    """The progress of a run at a checkpoint."""

    step: int
    world_size: int
    """Number of data-parallel ranks."""
    evaluation_due: bool = False
    """Whether a request to stop interrupted the evaluation after this step."""


@dataclass(frozen=True)
class Run:
    """The identity of the run that wrote a checkpoint."""

    id: str = ""
    """Id of the run, kept when it is resumed."""
    launch: str = ""
    """Id of the launch, different each time the run is started or resumed."""
    start: int = 0
    """Step from which the launch started."""
    overwrites: bool = False
    """Whether the launch may replace the checkpoints of earlier runs."""
    contents: Contents = field(default_factory=Contents)
    """Digests of data and target."""


@dataclass(frozen=True)
class Marker:
    """Contents of a marker."""

    progress: Progress
    run: Run
    files: Files = field(default_factory=dict)


def write_marker(folder: Path, progress: Progress, run: Run) -> None:
    """Write the marker, the last file of a complete checkpoint folder, once the other files are on disk."""
    paths = sorted(folder.rglob("*"))
    files = [path for path in paths if path.is_file()]
    # Syncing and hashing release the GIL.
    with ThreadPoolExecutor() as pool:
        # A file is safe only once the folder that names it is on disk, too.
        list(pool.map(sync, paths))
        described = zip(files, pool.map(_describe, files), strict=True)
    saved = {str(file.relative_to(folder)): entry for file, entry in described}
    marker = asdict(Marker(progress, run, saved))
    with replacing(folder / MARKER) as unfinished:
        unfinished.write_text(json.dumps(marker.pop("progress") | marker))
    sync(folder)


def is_whole(folder: Path) -> bool:
    """Whether `folder` has a marker, so that the save was finished. `damage` checks the files."""
    return (folder / MARKER).is_file()


def read_marker(folder: Path) -> Marker | None:
    """The marker of a folder; None if it is invalid. Raises OSError."""
    try:
        saved = json.loads((folder / MARKER).read_text())
        return TypeAdapter(Marker).validate_python(saved | {"progress": saved})
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def damage(folder: Path) -> str | None:
    """A description of the first file in `folder` that differs from what was saved; None if there is none."""
    if not is_whole(folder):
        return f"{folder} was not saved whole (no {MARKER})"
    try:
        saved = read_marker(folder)
        if saved is None:
            return f"{folder / MARKER} is not a valid marker"
        # Digests read gigabytes, so sizes are compared first.
        return _size_damage(folder, saved.files) or _content_damage(folder, saved.files)
    except ValueError as error:  # a name with a null byte
        return f"{folder / MARKER} names an impossible file ({error})"
    except OSError as error:
        return f"{error.filename or folder} cannot be read ({error.strerror})"


def _size_damage(folder: Path, files: Files) -> str | None:
    """The first missing, resized or added file. Cheap, so it comes before the digests."""
    for name, entry in files.items():
        file = folder / name
        # The marker may come from an untrusted source.
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            return f"{folder / MARKER} names {name}, a file outside the folder"
        if not file.is_file():
            return f"{file} is missing"
        if file.stat().st_size != entry.bytes:
            return f"{file} has {file.stat().st_size} bytes, {entry.bytes} were saved"
    # Shards are found by their names, so a further one would be loaded.
    for file in sorted(folder.rglob("*_states.pt")):
        if str(file.relative_to(folder)) not in files:
            return f"{file} does not belong to the checkpoint"
    return None


def _content_damage(folder: Path, files: Files) -> str | None:
    changed = (name for name, entry in files.items() if _describe(folder / name) != entry)
    return next((f"{folder / name} is not the file that was saved" for name in changed), None)


def _describe(file: Path) -> SavedFile:
    with file.open("rb") as handle:
        return SavedFile(file.stat().st_size, hashlib.file_digest(handle, "blake2b").hexdigest())
