"""The user's cache."""

import os
from pathlib import Path


def user_cache(kind: str) -> Path:
    """The folder for one kind of files, in $XDG_CACHE_HOME or ~/.cache. Raises RuntimeError if there is no home."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "longspec" / kind
