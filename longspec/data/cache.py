"""Tables on disk that are built once. Their content is verified before each use."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock

from longspec.digests import file_digests
from longspec.errors import UserError, first_line
from longspec.extras import extra
from longspec.replacing import replacing

with extra("train"):
    from datasets import Dataset
    from datasets.table import MemoryMappedTable, concat_tables

logger = logging.getLogger(__name__)

DIGESTS = "digests.json"
"""File in a cached table with the digest of each Arrow file, by name."""


def cached_table(folder: Path, build: Callable[[str], object]) -> Dataset:
    """The memory-mapped table in `folder`. It is built if it is missing or differs from its digests.

    build: writes Arrow files to the folder that is passed to it, which are concatenated in the order of their names.
    One process builds at a time, and others wait for its table. Raises UserError if the table cannot be written.
    """
    if not folder.exists() or _is_damaged(folder):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_name(f".{folder.name}.lock")):
                # Another process may have rebuilt it while this one waited for the lock.
                if folder.exists() and _is_damaged(folder):
                    logger.warning("cached table %s has changed since it was written; it is rebuilt", folder)
                    shutil.rmtree(folder)
                if not folder.exists():
                    with replacing(folder, folder=True) as unfinished:
                        build(str(unfinished))
                        (unfinished / DIGESTS).write_text(json.dumps(_digests(unfinished)))
        except OSError as error:
            raise UserError(
                f"{folder.parent}: the cached table cannot be written ({first_line(error)}); "
                "free space, or give another folder as data.cache_dir"
            ) from error

    # Memory-mapped: data-loading processes share the pages, and start-up reads nothing.
    tables = [MemoryMappedTable.from_file(str(path)) for path in sorted(folder.glob("*.arrow"))]
    # Without a fingerprint, datasets would pickle and hash the whole table.
    return Dataset(concat_tables(tables), fingerprint=folder.name)


def _is_damaged(folder: Path) -> bool:
    """Whether a table differs from its digests, or one of them is missing or unreadable."""
    try:
        return json.loads((folder / DIGESTS).read_text()) != _digests(folder)
    except (OSError, ValueError):
        return True


def _digests(folder: Path) -> dict[str, str]:
    """The digest of each Arrow file in `folder`, by name."""
    paths = sorted(folder.glob("*.arrow"))
    return dict(zip((path.name for path in paths), file_digests(paths), strict=True))
