"""Digests of the data and the target of a run, independent of paths and modification times."""

from dataclasses import dataclass, field

from longspec.data.lines import content_digests
from longspec.models.content import COMMIT, Digests, target_digests
from longspec.models.target_files import read_config
from longspec.train.config_schema import TrainConfig


@dataclass(frozen=True)
class Contents:
    """Digests of the files that a run reads, as lists of [name, digest]."""

    data: Digests = field(default_factory=list)
    held_out: Digests = field(default_factory=list)
    target: Digests = field(default_factory=list)


def contents_of(config: TrainConfig, target: str) -> Contents:
    """The digests of a run's data and of `target`, a folder or hub id. Reads all of the data.

    Raises UserError for missing files.
    """
    sets = (config.data.files, config.evaluation.files)
    data, held_out = (content_digests(files) if files else [] for files in sets)
    return Contents(data, held_out, target_digests(target, read_config(target)))


def changes(saved: Contents, current: Contents) -> list[str]:
    """The differences between the data and target of a checkpoint and those of the run that resumes it."""
    differences = {
        "data.files": _difference(saved.data, current.data),
        "model_name_or_path": _difference(saved.target, current.target),
    }
    return [f"{key}: {difference}" for key, difference in differences.items() if difference]


def digests_only(files: Digests) -> list[str]:
    """The digests in order. Two lists of files with equal ones hold the same data, which may have moved."""
    return [digest for _, digest in files]


def _difference(saved: Digests, current: Digests) -> str | None:
    """The first file that was removed, added or changed; None if there is none."""
    old, new = digests_only(saved), digests_only(current)
    if old == new:
        return None
    counts = f"({len(old)} files then, {len(new)} now)"
    gone = [entry for entry in saved if entry[1] not in new]
    added = [name for name, digest in current if digest not in old]
    if len(old) == len(new) == 1 and COMMIT.fullmatch(old[0]) and COMMIT.fullmatch(new[0]):
        name, commit = gone[0]
        return (
            f"{name} was commit {commit}, is commit {new[0]}; to continue with the first one, give the folder that "
            f"`hf download {name} --revision {commit}` prints"
        )
    if gone and added:
        return f"the contents of {added[0]} changed {counts}"
    if gone or added:
        return f"{gone[0][0]} was removed {counts}" if gone else f"{added[0]} was added {counts}"
    return f"the same files in another order or number {counts}"
