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
from itertools import count
from pathlib import Path

from longspec.errors import UserError
from longspec.models.draft_files import DRAFT_WEIGHTS_NAME
from longspec.replacing import sync
from longspec.train.markers import MARKER, Marker, Progress, Run, damage, is_whole, read_marker

logger = logging.getLogger(__name__)

STATES = ("saving_ds", "last_ds", "last_2ds")
"""Folders of DeepSpeed's state: staged, newest and second newest."""
DRAFTS = ("saving_checkpoint", "checkpoint-last", "checkpoint-2last")
"""Folders of the draft: staged, newest and second newest."""
BEST = ("saving_best", "checkpoint-best")
"""Folders of the best draft: staged and current."""
EARLIER = "checkpoint-earlier"
"""Prefix of the folders with drafts of earlier runs."""


def complete_saves(output: Path) -> None:
    """Complete the renames of finished saves and remove unfinished ones. Can be repeated after a crash.

    Checkpoints of another run are not rotated. Their drafts are kept as `checkpoint-earlier-*`, or removed if the run
    that saves may overwrite them.
    """
    staged_draft = output / DRAFTS[0]
    if is_whole(staged_draft):
        new = marker_of(staged_draft)
        # The state comes first: the staged draft marks the save as complete until its own rename.
        for names in (STATES, DRAFTS):
            _rotate(output, names, new)
        if new.run.overwrites and _is_superseded(output / BEST[1], new):
            _remove(output / BEST[1])

    staged_best = output / BEST[0]
    if is_whole(staged_best):
        best = output / BEST[1]
        new = marker_of(staged_best)
        if is_whole(best) and marker_of(best).run.id != new.run.id and not new.run.overwrites:
            _keep(best)
        _remove(best)
        staged_best.rename(best)

    # A staged folder that is left belongs to an unfinished save.
    for name in (STATES[0], DRAFTS[0], BEST[0]):
        _remove(output / name)
    if output.is_dir():
        sync(output)


def _rotate(output: Path, names: tuple[str, str, str], new: Marker) -> None:
    """Rename the staged folder of `names` to the newest one, and the newest one to the second newest."""
    staged, last, second = (output / name for name in names)
    if not staged.exists():
        return
    # Only the launch's own history rotates; checkpoints that it did not continue from make room.
    for folder in (second, last):
        if _is_superseded(folder, new):
            if names is DRAFTS and not new.run.overwrites:
                _keep(folder)
            else:
                _remove(folder)
    if is_whole(last):
        _remove(second)
        last.rename(second)
    elif names is DRAFTS and not new.run.overwrites and (last / DRAFT_WEIGHTS_NAME).exists():
        # A draft that a user copied there without its marker.
        _keep(last)
    _remove(last)
    staged.rename(last)


def _is_superseded(folder: Path, new: Marker) -> bool:
    """Whether `folder` is not part of the history of the launch that saved `new`.

    It is of another run, or of a later step than the one from which the launch started, because its state was damaged.
    """
    if not is_whole(folder):
        return False
    old = marker_of(folder)
    # Its later steps were trained from a state that could not be loaded again.
    went_back = old.run.launch != new.run.launch and old.progress.step > new.run.start
    return old.run.id != new.run.id or went_back


def marker_of(folder: Path) -> Marker:
    """The marker of a folder; that of an unknown run if it is invalid."""
    return read_marker(folder) or Marker(Progress(0, 0), Run(id="unknown"))


def _keep(folder: Path) -> None:
    """Rename a draft folder to the next free `checkpoint-earlier-*`."""
    names = (folder.with_name(f"{EARLIER}-{number}") for number in count(1))
    kept = next(name for name in names if not os.path.lexists(name))
    folder.rename(kept)
    logger.info("%s was saved before this run started; it is kept as %s", folder, kept.name)


def _remove(folder: Path) -> None:
    """Remove a folder, or only the link if it is a symbolic link, whose target may hold other files."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        # Marker first, so that a partly removed folder does not look complete.
        (folder / MARKER).unlink(missing_ok=True)
        shutil.rmtree(folder)


def states(output: Path) -> list[Path]:
    """Folders with DeepSpeed state in an output folder, newest first, damaged or not."""
    # A staged state counts as soon as the staged draft has its marker.
    names = STATES if is_whole(output / DRAFTS[0]) else STATES[1:]
    return [output / name for name in names if (output / name).exists()]


def drafts(output: Path) -> list[Path]:
    """Draft folders of finished saves in an output folder, newest first."""
    # Shorter names have smaller numbers: -2 comes before -10.
    earlier = sorted(output.glob(f"{EARLIER}-*"), key=lambda path: (len(path.name), path.name), reverse=True)
    folders = [*(output / name for name in (*DRAFTS, *BEST)), *earlier]
    return [folder for folder in folders if is_whole(folder)]


def check_folders(output: Path) -> None:
    """Raise UserError if a checkpoint's name is a dangling link or not a folder."""
    for folder in (output / name for name in (*STATES, *DRAFTS, *BEST)):
        if folder.is_symlink() and not folder.exists():
            raise UserError(
                f"{folder}: a link to {os.readlink(folder)}, which does not exist; mount it or remove the link"
            )
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder}: the name of a checkpoint, but not a folder; move it away")


def find_latest(output_dir: str | Path) -> tuple[Path, Progress] | None:
    """The newest undamaged DeepSpeed state in an output folder; None if there is no state.

    Logs a warning if it is the older generation. Raises UserError if all states are damaged.
    """
    output = Path(output_dir)
    advice = (
        f"restore {STATES[1]} or {STATES[2]}, remove them to start from the draft that was saved with them, or train "
        "into another output_dir"
    )
    latest = _first_undamaged(states(output), "checkpoint", output, advice)
    if latest is not None and latest[0].name == STATES[2] and not (output / STATES[1]).exists():
        # Going back silently would look like lost steps.
        logger.warning("%s is missing: going back to the older checkpoint %s", output / STATES[1], latest[0])
    return latest


def find_draft(output_dir: str | Path) -> tuple[Path, Progress] | None:
    """The newest undamaged draft in an output folder; None if there is no draft.

    Logs a warning if newer ones are damaged. Raises UserError if all drafts are damaged.
    """
    advice = "restore one of them, or give overwrite_output_dir=true to start a new run"
    return _first_undamaged(drafts(Path(output_dir)), "draft", output_dir, advice)


def _first_undamaged(folders: list[Path], kind: str, output: str | Path, advice: str) -> tuple[Path, Progress] | None:
    """The first undamaged folder with its progress; None if there is no folder. Raises UserError if all are damaged.

    kind, output, advice: parts of the messages.
    """
    problems: list[str] = []
    for folder in folders:
        if problem := damage(folder):
            problems.append(problem)
            continue
        if problems:
            logger.warning("%s: going back to the older %s %s", problems[0], kind, folder)
        return folder, marker_of(folder).progress
    if problems:
        raise UserError(f"{output}: no {kind} can be loaded: {'; '.join(problems)}; {advice}")
    return None
