"""A run's checkpoints on disk: two generations, each whole or not there at all.

An output folder holds, newest first,

    last_ds,  checkpoint-last       DeepSpeed's state without the frozen target, and beside it the draft for users
    last_2ds, checkpoint-2last      the same one save earlier

and, if the run was told to keep it, in `checkpoint-best` the draft of its best evaluation.

A save writes into `saving_*` folders and seals each as its last act: a marker that lists every file with its digest.
The marker of `saving_checkpoint` decides: with it the save is whole and only renames are left, which `settle` finishes
after a crash; without it the save never was. So at any moment at least one generation is whole.
"""

import hashlib
import json
import logging
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from longspec.errors import UserError

logger = logging.getLogger(__name__)

MARKER = "complete.json"
STATES = ("saving_ds", "last_ds", "last_2ds")
BEST = ("saving_best", "checkpoint-best")
DRAFTS = ("saving_checkpoint", "checkpoint-last", "checkpoint-2last")


@dataclass(frozen=True)
class Progress:
    """How far a checkpoint is, and how many ranks brought it there (those that train on different rows)."""

    step: int
    world_size: int


def seal(folder: Path, progress: Progress) -> None:
    """Mark `folder` as whole, once everything in it is on the disk."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with ThreadPoolExecutor() as pool:
        described = dict(zip((str(path.relative_to(folder)) for path in files), pool.map(_settled, files), strict=True))
    for inner in (path for path in folder.rglob("*") if path.is_dir()):
        _sync(inner)
    unfinished = folder / f"{MARKER}.tmp"
    unfinished.write_text(json.dumps(asdict(progress) | {"files": described}))
    _sync(unfinished)
    unfinished.rename(folder / MARKER)
    _sync(folder)


def _settled(file: Path) -> dict[str, Any]:
    """What the marker says of a file, after it has reached the disk."""
    _sync(file)
    return _description(file)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _description(file: Path) -> dict[str, Any]:
    with file.open("rb") as handle:
        return {"bytes": file.stat().st_size, "blake2b": hashlib.file_digest(handle, "blake2b").hexdigest()}


def is_whole(folder: Path) -> bool:
    """Whether a save into `folder` was finished; what became of its files since then, `damage` says."""
    return (folder / MARKER).is_file()


def damage(folder: Path) -> str | None:
    """The first thing in `folder` that is not as it was saved; None if all is."""
    if not is_whole(folder):
        return f"{folder} was not saved whole (no {MARKER})"
    try:
        files = json.loads((folder / MARKER).read_text())["files"]
        for name, saved in files.items():
            file = folder / name
            if not file.is_file():
                return f"{file} is missing"
            if file.stat().st_size != saved["bytes"]:
                return f"{file} has {file.stat().st_size} bytes, {saved['bytes']} were saved"
        for name, saved in files.items():
            if _description(folder / name) != saved:
                return f"{folder / name} is not the file that was saved"
    except (ValueError, LookupError, TypeError):
        return f"{folder / MARKER} is no marker of ours"
    except OSError as error:
        return f"{error.filename or folder} cannot be read ({error.strerror})"
    return None


def read_progress(folder: Path) -> Progress:
    marker = json.loads((folder / MARKER).read_text())
    return Progress(marker["step"], marker["world_size"])


def set_newer_aside(output: Path, chosen: Path, progress: Progress) -> None:
    """Once a run goes on from `chosen`, what is damaged or of another step in the place of the newest is no longer
    whole: the next save takes its place, and not that of the older generation. Its marker stays, under another name."""
    for newest in (output / STATES[1], output / DRAFTS[1]):
        if newest != chosen and is_whole(newest) and (damage(newest) or read_progress(newest) != progress):
            (newest / MARKER).rename(newest / f"{MARKER}.aside")


def settle(output: Path) -> None:
    """Finish the renames of whole saves and remove others, the best draft's, too. Safe to call again after a crash."""
    whole = is_whole(output / DRAFTS[0])
    for staged, last, second in ([output / name for name in names] for names in (STATES, DRAFTS)):
        if not staged.exists():
            continue
        if not whole:
            _remove(staged)
            continue
        if is_whole(last):
            _remove(second)
            last.rename(second)
        _remove(last)
        staged.rename(last)
    staged, best = (output / name for name in BEST)
    if is_whole(staged):
        _remove(best)
        staged.rename(best)
    _remove(staged)
    if output.is_dir():
        _sync(output)


def _remove(folder: Path) -> None:
    if folder.exists():
        (folder / MARKER).unlink(missing_ok=True)  # first: a folder that is half gone must not look whole
        shutil.rmtree(folder)


def find_latest(output_dir: str | Path) -> tuple[Path, Progress] | None:
    """The newest undamaged DeepSpeed state in an output folder; None if no save ever began there.

    Says so in the log when that is the older one. Raises UserError if there are states but all of them are damaged.
    """
    output = Path(output_dir)
    settle(output)
    problems: list[str] = []
    for folder in (output / name for name in STATES[1:]):
        if not folder.exists():
            continue
        problem = damage(folder)
        if problem is None:
            if folder.name != STATES[1]:
                reason = problems[0] if problems else f"{output / STATES[1]} is missing"
                logger.warning("%s: going back to the older checkpoint %s", reason, folder)
            return folder, read_progress(folder)
        problems.append(problem)
    if problems:
        raise UserError(
            f"{output}: no checkpoint there can be loaded: {'; '.join(problems)}; restore {STATES[1]} or {STATES[2]}, "
            "or train into another output_dir"
        )
    return None
