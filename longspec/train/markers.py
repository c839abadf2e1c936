"""The marker of a complete checkpoint folder: its files with their digests, its progress and its run.

Each rank describes the files that it wrote. Rank 0 checks that it sees all of them before it writes the marker.
"""

import hashlib
import json
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path, PurePosixPath
from typing import Any

from longspec.errors import UserError
from longspec.replacing import replacing, sync
from longspec.train.contents import Contents

MARKER = "complete.json"
"""File name of the marker, the last file that a save writes."""
Files = dict[str, dict[str, Any]]
"""Size in bytes and blake2b digest of each file, by its path relative to the checkpoint folder."""


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
    contents: Contents | None = None
    """Digests of data and target; None in checkpoints of older versions."""


@dataclass(frozen=True)
class Marker:
    """Contents of a marker."""

    progress: Progress
    run: Run = field(default_factory=Run)
    files: Files = field(default_factory=dict)


def describe(folder: Path, files: Iterable[Path]) -> Files:
    """Size and digest of each of `files`, all in `folder`, after syncing them to disk."""
    files = list(files)
    # Hashing and syncing release the GIL.
    with ThreadPoolExecutor() as pool:
        descriptions = pool.map(_synced_description, files)
        return {str(file.relative_to(folder)): entry for file, entry in zip(files, descriptions, strict=True)}


def write_marker(folder: Path, progress: Progress, run: Run | None = None, reports: Sequence[Files] = ()) -> None:
    """Write the marker, the last file of a complete checkpoint folder.

    reports: each rank's description of the files that it wrote. This function describes all other files in the folder.
    Raises UserError if a reported file is missing here, as with an output folder that is local to each host.
    """
    files: Files = {}
    for rank, report in enumerate(reports):
        # Every rank wrote to the path; only a shared folder shows rank 0 the files of all hosts.
        _check_visible(folder, rank, report)
        files |= report
    others = [
        path for path in sorted(folder.rglob("*")) if path.is_file() and str(path.relative_to(folder)) not in files
    ]
    files |= describe(folder, others)
    # A file is safe only once the folder that names it is on disk, too.
    for path in folder.rglob("*"):
        if path.is_dir():
            sync(path)

    with replacing(folder / MARKER) as unfinished:
        unfinished.write_text(json.dumps(asdict(progress) | {"run": asdict(run or Run()), "files": files}))
    sync(folder)


def _check_visible(folder: Path, rank: int, report: Files) -> None:
    for name, entry in report.items():
        file = folder / name
        if not file.is_file() or file.stat().st_size != entry["bytes"]:
            raise UserError(
                f"{file}: written by rank {rank}, but rank 0 does not see it as written; output_dir must be one folder "
                "that all hosts share"
            )


def is_whole(folder: Path) -> bool:
    """Whether `folder` has a marker, so that the save was finished. `damage` checks the files."""
    return (folder / MARKER).is_file()


def read_marker(folder: Path) -> Marker | None:
    """The marker of a folder; None if it is invalid. Raises OSError."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        progress = Progress(int(marker["step"]), int(marker["world_size"]), bool(marker.get("evaluation_due")))
        run = _run(marker.get("run", {}))
        files = {
            name: {"bytes": entry["bytes"], "blake2b": entry["blake2b"]} for name, entry in marker["files"].items()
        }
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return Marker(progress, run, files)


def _run(saved: dict[str, Any]) -> Run:
    """The run in a marker. Older versions wrote fewer fields."""
    contents = saved.get("contents")
    if contents is not None:
        names = (key.name for key in fields(Contents))
        contents = Contents(**{name: [[str(file), str(digest)] for file, digest in contents[name]] for name in names})
    start, overwrites = int(saved.get("start", 0)), bool(saved.get("overwrites"))
    return Run(str(saved.get("id", "")), str(saved.get("launch", "")), start, overwrites, contents)


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
        if file.stat().st_size != entry["bytes"]:
            return f"{file} has {file.stat().st_size} bytes, {entry['bytes']} were saved"
    # Shards are found by their names, so a further one would be loaded.
    for file in sorted(folder.rglob("*_states.pt")):
        if str(file.relative_to(folder)) not in files:
            return f"{file} does not belong to the checkpoint"
    return None


def _content_damage(folder: Path, files: Files) -> str | None:
    for name, entry in files.items():
        if _description(folder / name) != entry:
            return f"{folder / name} is not the file that was saved"
    return None


def _synced_description(file: Path) -> dict[str, Any]:
    sync(file)
    return _description(file)


def _description(file: Path) -> dict[str, Any]:
    with file.open("rb") as handle:
        return {"bytes": file.stat().st_size, "blake2b": hashlib.file_digest(handle, "blake2b").hexdigest()}
