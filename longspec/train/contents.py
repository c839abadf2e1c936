"""Digests of the data and the target that a run trains on, which do not depend on paths or modification times."""

from dataclasses import dataclass

from longspec.data.records import Files, content_digests
from longspec.models.content import Digests, target_digests
from longspec.models.target_files import read_config
from longspec.train.config import TrainConfig


@dataclass(frozen=True)
class Contents:
    """Digests of the files that a run reads."""

    data: Digests
    held_out: Digests
    target: Digests


def contents_of(config: TrainConfig, target: str) -> Contents:
    """The digests of a run's data and of `target`, a folder or hub id. Reads all of the data once.

    Raises UserError for files that are gone.
    """
    held_out = config.evaluation.files
    return Contents(
        _digests(config.data.files),
        [] if held_out is None else _digests(held_out),
        target_digests(target, read_config(target)),
    )


def changes(before: Contents, now: Contents) -> list[str]:
    """What differs between the data and target of a checkpoint and those of the run that resumes from it."""
    return [*_changes("data.files", before.data, now.data), *_changes("model_name_or_path", before.target, now.target)]


def _changes(key: str, before: Digests, now: Digests) -> list[str]:
    """Names of files do not count: `now` may be the same data at another path."""
    old, new = ([digest for _, digest in digests] for digests in (before, now))
    if old == new:
        return []
    if len(old) != len(new):
        return [f"{key}: {len(old)} files then, {len(new)} now"]
    if sorted(old) == sorted(new):
        return [f"{key}: the same files in another order"]
    changed = [name for (name, digest), other in zip(now, old, strict=True) if digest != other]
    more = f" (and of {len(changed) - 1} more)" if len(changed) > 1 else ""
    return [f"{key}: the contents of {changed[0]}{more} changed"]


def _digests(files: Files) -> Digests:
    return [[file, digest] for file, digest in content_digests(files)]
