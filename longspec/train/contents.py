"""Digests of the data and the target of a run, independent of paths and modification times."""

from dataclasses import dataclass

from longspec.data.lines import Files, content_digests
from longspec.models.content import COMMIT, Digests, target_digests
from longspec.models.target_files import read_config
from longspec.train.config_schema import TrainConfig


@dataclass(frozen=True)
class Contents:
    """Digests of the files that a run reads, as lists of [name, digest]."""

    data: Digests
    held_out: Digests
    target: Digests


def contents_of(config: TrainConfig, target: str) -> Contents:
    """The digests of a run's data and of `target`, a folder or hub id. Reads all of the data.

    Raises UserError for missing files.
    """
    held_out = config.evaluation.files
    return Contents(
        data=_digests(config.data.files),
        held_out=[] if held_out is None else _digests(held_out),
        target=target_digests(target, read_config(target)),
    )


def changes(saved: Contents, current: Contents) -> list[str]:
    """The differences between the data and target of a checkpoint and those of the run that resumes it."""
    return [
        *_changes("data.files", saved.data, current.data),
        *_changes("model_name_or_path", saved.target, current.target),
    ]


def _changes(key: str, saved: Digests, current: Digests) -> list[str]:
    """At most one difference. Names do not count, because the same data may have moved."""
    old = [digest for _, digest in saved]
    new = [digest for _, digest in current]
    if old == new:
        return []
    if len(old) != len(new):
        return [f"{key}: {_count_change(saved, current)}"]
    # The order of files decides the order of rows.
    if sorted(old) == sorted(new):
        return [f"{key}: the same files in another order"]
    if len(new) == 1 and COMMIT.fullmatch(old[0]) and COMMIT.fullmatch(new[0]):
        name = saved[0][0]
        return [
            f"{key}: {name} was commit {old[0]}, is commit {new[0]}; to continue with the first one, give the folder "
            f"that `hf download {name} --revision {old[0]}` prints"
        ]
    changed = [name for (name, digest), saved_digest in zip(current, old, strict=True) if digest != saved_digest]
    others = f" (and of {len(changed) - 1} more)" if len(changed) > 1 else ""
    return [f"{key}: the contents of {changed[0]}{others} changed"]


def _count_change(saved: Digests, current: Digests) -> str:
    """The first file that was removed or added, and the number of files before and after."""
    saved_digests = [digest for _, digest in saved]
    current_digests = [digest for _, digest in current]
    counts = f"{len(saved)} files then, {len(current)} now"
    removed = [name for name, digest in saved if digest not in current_digests]
    if removed:
        return f"{removed[0]} was removed ({counts})"
    added = [name for name, digest in current if digest not in saved_digests]
    if added:
        return f"{added[0]} was added ({counts})"
    return f"{counts}, with the same contents"


def _digests(files: Files) -> Digests:
    return [[file, digest] for file, digest in content_digests(files)]
