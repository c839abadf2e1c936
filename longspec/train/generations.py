"""The checkpoint folders of a run: two generations, each of them complete or absent.

An output folder holds, newest first,

    last_ds,  checkpoint-last       DeepSpeed's state without the frozen target, and the draft for users
    last_2ds, checkpoint-2last      the same of the save before
    checkpoint-best                 the draft of the best evaluation, if evaluation.keep_best is set
    checkpoint-earlier-1, -2, …     drafts of earlier runs in this folder, which are never removed

A save writes into `saving_*` folders, and a marker (see `markers`) at the end of each. The one of `saving_checkpoint`
decides whether the save counts. If it exists, only renames are left, which `complete_saves` does even after a crash.
If not, the save is discarded. At least one generation is therefore complete at any moment after the first save.

Only the run that holds the folder's lock calls `complete_saves`. The other functions only read.
"""

import logging
import os
import shutil
from itertools import count, pairwise
from pathlib import Path

from longspec.errors import UserError
from longspec.models.draft_files import DRAFT_WEIGHTS_NAME, LAST_DRAFT
from longspec.replacing import sync
from longspec.train.markers import Marker, damage, is_whole, read_marker

logger = logging.getLogger(__name__)

STATES = ("saving_ds", "last_ds", "last_2ds")
"""Folders of DeepSpeed's state: staged, newest and second newest."""
DRAFTS = ("saving_checkpoint", LAST_DRAFT, "checkpoint-2last")
"""Folders of the draft: staged, newest and second newest."""
BEST = ("saving_best", "checkpoint-best")
"""Folders of the best draft: staged and current."""
EARLIER = "checkpoint-earlier"
"""Prefix of the folders with drafts of earlier runs."""
REMOVED = ".removed"
"""Name of a folder while it is removed."""
METRICS_NAME = "metrics.jsonl"
"""File of an output folder with one JSON line per step."""


def complete_saves(output: Path, overwrite: bool = False) -> None:
    """Complete the renames of finished saves and remove unfinished ones. Can be repeated after a crash.

    Checkpoints of another run are not rotated. Their drafts are kept as `checkpoint-earlier-*`, or removed if
    `overwrite` is set.
    """
    if (output / REMOVED).exists():
        shutil.rmtree(output / REMOVED)
    # The state comes first: the staged draft marks the save as complete until its own rename.
    for names, marked in ((STATES, DRAFTS), (DRAFTS, DRAFTS), (BEST, BEST)):
        if is_whole(output / marked[0]) and (output / names[0]).exists():
            new, best = marker_of(output / marked[0]), output / BEST[1]
            if overwrite and is_whole(best) and marker_of(best).run.id != new.run.id:
                _remove(best)
            _rotate([output / name for name in names], new, overwrite)
    # A staged folder that is left belongs to an unfinished save.
    for name in (STATES[0], DRAFTS[0], BEST[0]):
        _remove(output / name)
    if output.is_dir():
        sync(output)


def _rotate(folders: list[Path], new: Marker, overwrite: bool) -> None:
    """Rename each of `folders`, the staged one first, to the next one, and remove the last one."""
    # The older one first, because the newest of the kept drafts has the largest number.
    for folder in reversed(folders[1:]):
        old = marker_of(folder)
        # Steps after this one were trained from a state that could not be loaded again.
        went_back = len(folders) > 2 and old.step >= new.step
        if not (is_whole(folder) and old.run.id == new.run.id) or went_back:
            _make_room(folder, overwrite)
    for newer, older in reversed(list(pairwise(folders))):
        if newer.exists():
            _remove(older)
            newer.rename(older)


def marker_of(folder: Path) -> Marker:
    """The marker of a folder; that of an unknown run if there is no valid one."""
    return (read_marker(folder) if is_whole(folder) else None) or Marker(0, 0)


def _make_room(folder: Path, overwrite: bool) -> None:
    """Rename a folder with a draft to the next free `checkpoint-earlier-*`. Remove others, and all with `overwrite`."""
    if overwrite or not (folder / DRAFT_WEIGHTS_NAME).exists():
        _remove(folder)
        return
    names = (folder.with_name(f"{EARLIER}-{number}") for number in count(1))
    kept = folder.rename(next(name for name in names if not name.exists()))
    logger.info("%s was saved before this run started; it is kept as %s", folder, kept.name)


def _remove(folder: Path) -> None:
    if folder.is_symlink():
        folder.unlink()  # what it leads to may hold other files
    elif folder.exists():
        # Renamed first, so that a partly removed folder is not taken for a checkpoint.
        shutil.rmtree(folder.rename(folder.with_name(REMOVED)))


def holds_run(output: Path) -> bool:
    """Whether an output folder has a checkpoint, from which a run can resume."""
    return bool(drafts(output) or states(output))


def states(output: Path) -> list[Path]:
    """Folders with DeepSpeed state in an output folder, newest first, damaged or not."""
    # A staged state counts as soon as the staged draft has its marker.
    names = STATES if is_whole(output / DRAFTS[0]) else STATES[1:]
    # A dangling link is a damaged state, not a missing one: the run must not start at step 0.
    return [output / name for name in names if os.path.lexists(output / name)]


def drafts(output: Path) -> list[Path]:
    """Draft folders of finished saves in an output folder, newest first."""
    # Shorter names have smaller numbers: -2 comes before -10.
    earlier = sorted(output.glob(f"{EARLIER}-*"), key=lambda path: (len(path.name), path.name), reverse=True)
    folders = [*(output / name for name in (*DRAFTS, *BEST)), *earlier]
    return [folder for folder in folders if is_whole(folder)]


def find_latest(output: Path) -> tuple[Path, Marker] | None:
    """The newest undamaged DeepSpeed state, with a warning if newer ones are damaged. Raises UserError if all are."""
    return _first_undamaged(states(output), "checkpoint")


def find_draft(output: Path) -> tuple[Path, Marker] | None:
    """The newest undamaged draft in an output folder, as `find_latest`."""
    return _first_undamaged(drafts(output), "draft")


def _first_undamaged(folders: list[Path], kind: str) -> tuple[Path, Marker] | None:
    problems: list[str] = []
    for folder in folders:
        if problem := damage(folder):
            problems.append(problem)
            continue
        if problems:
            logger.warning("%s: going back to the older %s %s", problems[0], kind, folder)
        return folder, marker_of(folder)
    if problems:
        raise UserError(
            f"no {kind} can be loaded: {'; '.join(problems)}; restore one of them, or train into another output_dir"
        )
    return None
