"""The user's cache, and the notice about work that is done once and kept there."""

import os
from pathlib import Path

from longspec.errors import warn_once


def user_cache(kind: str) -> Path:
    """The folder for one kind of files, in $XDG_CACHE_HOME if that is an absolute path, as its specification says, else
    in ~/.cache. Raises RuntimeError if there is no home."""
    folder = Path(os.environ.get("XDG_CACHE_HOME", ""))
    return (folder if folder.is_absolute() else Path.home() / ".cache") / "longspec" / kind


def announce_first_use() -> None:
    """Log the notice, once per process. Called before kernels are compiled or rounds are measured."""
    warn_once(
        "kernels are compiled and rounds measured for this model, device and batch size; it takes some seconds, once"
    )
