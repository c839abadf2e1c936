"""A run's checkpoints on disk: two generations, each whole or not there at all.

An output folder holds, newest first,

    last_ds,  checkpoint-last       DeepSpeed's state without the frozen target, and the draft for users
    last_2ds, checkpoint-2last      the same one save earlier
    checkpoint-best                 the draft of the best evaluation, if the run was told to keep it
    checkpoint-earlier-1, -2, …     drafts of earlier runs in this folder, which no rotation removes

A save writes into `saving_*` folders and seals each as its last act (see `seals`). The marker of `saving_checkpoint`
decides: with it the save is whole and only renames are left, which `settle` finishes after a crash; without it the
save never was. So at any moment at least one generation is whole.

Only the run that holds the folder's lock (see `folder_lock`) calls `settle`. All other functions here only read.
"""

import logging
import os
import shutil
from pathlib import Path

from longspec.errors import UserError
from longspec.train.seals import MARKER, Progress, Run, Seal, damage, is_whole, read_seal, sync

logger = logging.getLogger(__name__)

STATES = ("saving_ds", "last_ds", "last_2ds")
BEST = ("saving_best", "checkpoint-best")
DRAFTS = ("saving_checkpoint", "checkpoint-last", "checkpoint-2last")
EARLIER = "checkpoint-earlier"


def settle(output: Path) -> None:
    """Finish the renames of whole saves and remove unfinished ones. Safe to call again after a crash.

    Checkpoints of another run are not rotated: their drafts are kept as `checkpoint-earlier-*`, or removed if the run
    that saved was allowed to overwrite them.
    """
    staged_draft, staged_best = output / DRAFTS[0], output / BEST[0]
    if is_whole(staged_draft):
        new = _seal_of(staged_draft)
        for names in (STATES, DRAFTS):
            _rotate(output, names, new)
        if new.run.overwrites and _is_superseded(output / BEST[1], new):
            _remove(output / BEST[1])
    if is_whole(staged_best):
        best, new = output / BEST[1], _seal_of(staged_best)
        if is_whole(best) and _seal_of(best).run.id != new.run.id and not new.run.overwrites:
            _keep(best)
        _remove(best)
        staged_best.rename(best)
    for name in (STATES[0], DRAFTS[0], BEST[0]):
        _remove(output / name)
    if output.is_dir():
        sync(output)


def _rotate(output: Path, names: tuple[str, str, str], new: Seal) -> None:
    """Make the staged folder of `names` the newest one and the newest one the second."""
    staged, last, second = (output / name for name in names)
    if not staged.exists():
        return
    for folder in (second, last):
        if _is_superseded(folder, new):
            if names is DRAFTS and not new.run.overwrites:
                _keep(folder)
            else:
                _remove(folder)
    if is_whole(last):
        _remove(second)
        last.rename(second)
    _remove(last)
    staged.rename(last)


def _is_superseded(folder: Path, new: Seal) -> bool:
    """Whether the launch that saved `new` did not go on from `folder`: it is of another run, or newer than the step
    from which the launch started, as when its state is damaged."""
    if not is_whole(folder):
        return False
    old = _seal_of(folder)
    went_back = old.run.launch != new.run.launch and old.progress.step > new.run.start
    return old.run.id != new.run.id or went_back


def _seal_of(folder: Path) -> Seal:
    """The seal of a folder, that of an unknown run if its marker is damaged."""
    return read_seal(folder) or Seal(Progress(0, 0), Run(id="unknown"))


def _keep(folder: Path) -> None:
    number = 1
    while os.path.lexists(kept := folder.with_name(f"{EARLIER}-{number}")):
        number += 1
    folder.rename(kept)
    logger.info("%s was saved before this run started; it is kept as %s", folder, kept.name)


def _remove(folder: Path) -> None:
    """Remove a folder; of a symbolic link the link alone, since its target may hold more."""
    if folder.is_symlink():
        folder.unlink()
    elif folder.exists():
        (folder / MARKER).unlink(missing_ok=True)  # first: a folder that is half gone must not look whole
        shutil.rmtree(folder)


def states(output: Path) -> list[Path]:
    """DeepSpeed states in an output folder, newest first, whole or not."""
    names = STATES if is_whole(output / DRAFTS[0]) else STATES[1:]
    return [output / name for name in names if (output / name).exists()]


def drafts(output: Path) -> list[Path]:
    """Drafts in an output folder that a run finished to save, newest first."""
    earlier = sorted(output.glob(f"{EARLIER}-*"), key=lambda path: (len(path.name), path.name), reverse=True)
    folders = [*(output / name for name in (*DRAFTS, *BEST)), *earlier]
    return [folder for folder in folders if is_whole(folder)]


def check_folders(output: Path) -> None:
    """Raise UserError for a checkpoint that is a dangling link or no folder."""
    for folder in (output / name for name in (*STATES, *DRAFTS, *BEST)):
        if folder.is_symlink() and not folder.exists():
            raise UserError(
                f"{folder}: a link to {os.readlink(folder)}, which is not there; mount it or remove the link"
            )
        if folder.exists() and not folder.is_dir():
            raise UserError(f"{folder}: a checkpoint's name, but not a folder; move it away")


def find_latest(output_dir: str | Path) -> tuple[Path, Progress] | None:
    """The newest undamaged DeepSpeed state in an output folder; None if there is no state.

    Warns if that is the older one. Raises UserError if there are states but all of them are damaged.
    """
    output = Path(output_dir)
    problems: list[str] = []
    for folder in states(output):
        problem = damage(folder)
        saved = None if problem else read_seal(folder)
        if saved is None:
            problems.append(problem or f"{folder} is not readable any more")
            continue
        if folder.name == STATES[2]:
            reason = problems[0] if problems else f"{output / STATES[1]} is missing"
            logger.warning("%s: going back to the older checkpoint %s", reason, folder)
        return folder, saved.progress
    if problems:
        raise UserError(
            f"{output}: no checkpoint there can be loaded: {'; '.join(problems)}; restore {STATES[1]} or {STATES[2]}, "
            "remove them to start anew from the draft that was saved with them, or train into another output_dir"
        )
    return None


def find_draft(output_dir: str | Path) -> tuple[Path, Progress] | None:
    """The newest undamaged draft in an output folder; None if none was ever saved.

    Raises UserError if there are drafts but all of them are damaged.
    """
    problems: list[str] = []
    for folder in drafts(Path(output_dir)):
        problem = damage(folder)
        saved = None if problem else read_seal(folder)
        if saved is not None:
            if problems:
                logger.warning("%s: going back to the older draft %s", problems[0], folder)
            return folder, saved.progress
        problems.append(problem or f"{folder} is not readable any more")
    if problems:
        raise UserError(
            f"{output_dir}: no draft there can be loaded: {'; '.join(problems)}; restore one of them, or give "
            "overwrite_output_dir=true to train anew"
        )
    return None
