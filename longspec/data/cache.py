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

from filelock import FileLock

from longspec.errors import UserError, first_line
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
    of their names. Files are compared with their digests on each call. A damaged table is rebuilt with one warning. A
    lock next to the folder lets one process build at a time; the others then find its table. Raises UserError if the
    table cannot be written.
    """
    if not folder.exists() or _damage(folder):
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(folder.with_name(f".{folder.name}.lock")):
                if damage := _damage(folder):  # unless another process has built it meanwhile
                    logger.warning("cached table %s: %s; it is built again", folder, damage)
                    shutil.rmtree(folder)
                if not folder.exists():
                    _build(folder, build)
        except OSError as error:
            raise UserError(
                f"{folder.parent}: the cached table cannot be written ({first_line(error)}); "
                "make room, or give another folder as data.cache_dir"
            ) from error
    tables = [MemoryMappedTable.from_file(str(path)) for path in _arrow_files(folder)]
    # A fingerprint of its own would be a hash of the pickled table.
    return Dataset(concat_tables(tables), fingerprint=folder.name)


def _build(folder: Path, build: Callable[[str], object]) -> None:
    unfinished = Path(mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
    try:
        build(str(unfinished))
        digests = dict(_digests(unfinished))
        (unfinished / DIGESTS).write_text(json.dumps(digests))
        unfinished.chmod(0o755)  # mkdtemp's are for their owner alone
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _damage(folder: Path) -> str | None:
    """The first difference between `folder` and its digests, or None if it is whole or does not exist."""
    if not folder.exists():
        return None
    try:
        expected = json.loads((folder / DIGESTS).read_text())
        found = dict(_digests(folder))
    except (OSError, ValueError) as error:
        return f"{DIGESTS} or a table is missing or unreadable ({first_line(error)})"
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
