"""Seals: a marker in a checkpoint folder lists its files with their digests and names the run that they belong to.

Every rank describes the files that it wrote itself; rank 0 checks that it sees them all before it seals the folder.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from longspec.errors import UserError
from longspec.train.contents import Contents

MARKER = "complete.json"
Files = dict[str, dict[str, Any]]
"""Size in bytes and blake2b digest of each file, by its path relative to the checkpoint folder."""


@dataclass(frozen=True)
class Progress:
    """The step of a checkpoint, the number of data-parallel ranks, and whether its evaluation was interrupted."""

    step: int
    world_size: int
    evaluation_due: bool = False


@dataclass(frozen=True)
class Run:
    """The run that wrote a checkpoint. A resumed run keeps its `id`; each launch of it has its own `launch`."""

    id: str = ""
    launch: str = ""
    start: int = 0
    """Step from which the launch started."""
    overwrites: bool = False
    """Whether the user allowed the launch to replace the checkpoints of earlier runs."""
    contents: Contents | None = None
    """Digests of data and target; None in checkpoints of older versions."""


@dataclass(frozen=True)
class Seal:
    """Contents of a marker."""

    progress: Progress
    run: Run = field(default_factory=Run)
    files: Files = field(default_factory=dict)


def describe(folder: Path, files: Iterable[Path]) -> Files:
    """Size and digest of `files`, all in `folder`, once they are on the disk."""
    files = list(files)
    with ThreadPoolExecutor() as pool:
        descriptions = pool.map(_settled, files)
        return {str(file.relative_to(folder)): entry for file, entry in zip(files, descriptions, strict=True)}


def seal(folder: Path, progress: Progress, run: Run | None = None, reports: Sequence[Files] = ()) -> None:
    """Mark `folder` as whole, as its last file.

    reports: what each rank wrote there (see `describe`). This process describes all other files itself. Raises
    UserError if a reported file is not visible here, as with an output folder that is local to each host.
    """
    for rank, report in enumerate(reports):
        for name, entry in report.items():
            file = folder / name
            if not file.is_file() or file.stat().st_size != entry["bytes"]:
                raise UserError(
                    f"{file}: written by rank {rank}, but rank 0 does not see it as written; "
                    "output_dir must be one folder that all hosts share"
                )
    files: Files = {name: entry for report in reports for name, entry in report.items()}
    mine = (path for path in sorted(folder.rglob("*")) if path.is_file() and str(path.relative_to(folder)) not in files)
    files |= describe(folder, mine)
    for inner in (path for path in folder.rglob("*") if path.is_dir()):
        sync(inner)
    unfinished = folder / f"{MARKER}.tmp"
    unfinished.write_text(json.dumps(asdict(progress) | {"run": asdict(run or Run()), "files": files}))
    sync(unfinished)
    unfinished.rename(folder / MARKER)
    sync(folder)


def is_whole(folder: Path) -> bool:
    """Whether a save into `folder` was finished. `damage` checks its files."""
    return (folder / MARKER).is_file()


def read_seal(folder: Path) -> Seal | None:
    """The seal of a folder; None if its marker is not one of ours. Raises OSError."""
    try:
        marker = json.loads((folder / MARKER).read_text())
        progress = Progress(int(marker["step"]), int(marker["world_size"]), bool(marker.get("evaluation_due")))
        run = _run(marker.get("run", {}))
        files = {
            name: {"bytes": entry["bytes"], "blake2b": entry["blake2b"]} for name, entry in marker["files"].items()
        }
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return None
    return Seal(progress, run, files)


def _run(saved: dict[str, Any]) -> Run:
    contents = saved.get("contents")
    if contents is not None:
        lists = (contents[name] for name in ("data", "held_out", "target"))
        contents = Contents(*([[str(file), str(digest)] for file, digest in digests] for digests in lists))
    return Run(
        id=str(saved.get("id", "")),
        launch=str(saved.get("launch", "")),
        start=int(saved.get("start", 0)),
        overwrites=bool(saved.get("overwrites")),
        contents=contents,
    )


def damage(folder: Path) -> str | None:
    """The first thing in `folder` that is not as it was saved; None if all is."""
    if not is_whole(folder):
        return f"{folder} was not saved whole (no {MARKER})"
    try:
        saved = read_seal(folder)
        if saved is None:
            return f"{folder / MARKER} is no marker of ours"
        for name, entry in saved.files.items():
            file = folder / name
            if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
                return f"{folder / MARKER} names {name}, a file outside the folder"
            if not file.is_file():
                return f"{file} is missing"
            if file.stat().st_size != entry["bytes"]:
                return f"{file} has {file.stat().st_size} bytes, {entry['bytes']} were saved"
        for file in sorted(folder.rglob("*_states.pt")):
            if str(file.relative_to(folder)) not in saved.files:
                return f"{file} does not belong to the checkpoint"
        for name, entry in saved.files.items():
            if _description(folder / name) != entry:
                return f"{folder / name} is not the file that was saved"
    except ValueError as error:  # a name with a null byte
        return f"{folder / MARKER} names a file that cannot be ({error})"
    except OSError as error:
        return f"{error.filename or folder} cannot be read ({error.strerror})"
    return None


def sync(path: Path) -> None:
    """Wait until a file or folder is on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _settled(file: Path) -> dict[str, Any]:
    sync(file)
    return _description(file)


def _description(file: Path) -> dict[str, Any]:
    with file.open("rb") as handle:
        return {"bytes": file.stat().st_size, "blake2b": hashlib.file_digest(handle, "blake2b").hexdigest()}
