"""Tables on disk that are built once and verified by content before each use."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import mkdtemp

from longspec.extras import extra

with extra("train"):
    import datasets
    from datasets import Dataset
    from datasets.table import MemoryMappedTable, concat_tables

logger = logging.getLogger(__name__)

DIGESTS = "digests.json"
"""File of a cached table that maps the name of each of its Arrow files to the digest of its bytes."""


def cache_folder(cache_dir: str | None) -> Path:
    """The folder of cached tables in `cache_dir` (None: that of Hugging Face datasets)."""
    return Path(cache_dir or datasets.config.HF_DATASETS_CACHE) / "longspec"


def cached_table(folder: Path, build: Callable[[str], object]) -> Dataset:
    """The memory-mapped table in `folder`, built there if it is missing or its files are not as they were written.

    `build` writes Arrow files anywhere below the folder that it is given; the table is their concatenation in the order
    of their names. Files are compared with their digests on each call. A damaged table is rebuilt with one warning, and
    concurrent builders each write a folder of their own, the first of which stays.
    """
    damage = _damage(folder)
    if damage:
        logger.warning("cached table %s: %s; it is built again", folder, damage)
        shutil.rmtree(folder)
    if not folder.exists():
        _build(folder, build)
    tables = [MemoryMappedTable.from_file(str(path)) for path in _arrow_files(folder)]
    # A fingerprint of its own would be a hash of the pickled table.
    return Dataset(concat_tables(tables), fingerprint=folder.name)


def _build(folder: Path, build: Callable[[str], object]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    unfinished = Path(mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        build(str(unfinished))
        digests = dict(_digests(unfinished))
        (unfinished / DIGESTS).write_text(json.dumps(digests))
        unfinished.chmod(0o755)  # mkdtemp's are for their owner alone
        try:
            unfinished.rename(folder)
        except OSError:
            if not folder.is_dir():  # no other process was first
                raise
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _damage(folder: Path) -> str | None:
    """The first difference between `folder` and its digests, or None if it is whole or does not exist."""
    if not folder.exists():
        return None
    try:
        expected = json.loads((folder / DIGESTS).read_text())
    except (OSError, ValueError):
        return f"{DIGESTS} is missing or unreadable"
    found = dict(_digests(folder))
    wrong = sorted(name for name in {*expected, *found} if expected.get(name) != found.get(name))
    return f"{wrong[0]} is not as it was written" if wrong else None


def _digests(folder: Path) -> list[tuple[str, str]]:
    paths = _arrow_files(folder)
    with ThreadPoolExecutor(min(max(1, len(paths)), os.cpu_count() or 1)) as pool:  # hashing releases the GIL
        return list(zip((str(path.relative_to(folder)) for path in paths), pool.map(_digest, paths), strict=True))


def _digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def _arrow_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*.arrow") if path.is_file())
