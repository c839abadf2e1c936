"""Data files and their lines: content digests, and a table that gives random access to all lines."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from longspec.digests import content_hash, file_digests
from longspec.errors import UserError
from longspec.extras import extra

if TYPE_CHECKING:
    from datasets import Dataset

Files = str | Path | Iterable[str | Path]
"""One or more files, folders or glob patterns."""

SUFFIXES = (".jsonl", ".ndjson", ".json")
"""Suffixes of JSONL files, in any case."""
VERSION = 2
"""Version of the cached tables. Increase it when the columns of lines or the digests of tables change."""
LINE_COLUMNS = {"file": "string", "line": "int64", "start": "int64", "digest": "int64"}
"""Columns of the table of lines (see `index_lines`)."""


def data_files(files: Files) -> list[str]:
    """The files of a file, a folder (recursively), a glob pattern, or a list of these. Raises UserError for none."""
    names = [files] if isinstance(files, str | Path) else list(files)
    if not names:
        raise UserError("no data files given: name at least one .jsonl file, folder or pattern")
    paths: list[str] = []
    for name in map(str, names):
        matches = _matching_files(name)
        if not matches:
            raise UserError(f"no data file at '{name}': give a .jsonl file, a folder of them, or a pattern")
        paths += matches
    # Checked here, because tokenization of the files before an unreadable one can take hours.
    for path in paths:
        if not os.access(path, os.R_OK):
            raise UserError(f"data file '{path}' cannot be read: check its permissions")
    return paths


def _matching_files(name: str) -> list[str]:
    if os.path.isfile(name):
        return [name]
    if os.path.isdir(name):
        inside = sorted(Path(name).rglob("*"))
        return [str(path) for path in inside if path.suffix.lower() in SUFFIXES and path.is_file()]
    return sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))


class FileDigest(NamedTuple):
    """One data file and the digest of its content."""

    path: str
    """Absolute path, without resolving symbolic links."""
    digest: str
    """BLAKE2b of the file's bytes, 128 bits as 32 hex digits."""


def content_digests(files: Files) -> list[FileDigest]:
    """The digest of each data file, in the order of `data_files(files)`.

    Every byte is read, because neither size nor modification time proves that a file is unchanged. Two lists describe
    the same data if their digests are equal in order; paths do not matter. Raises UserError for a missing or unreadable
    file.
    """
    paths = [os.path.abspath(path) for path in data_files(files)]
    return list(map(FileDigest, paths, file_digests(paths)))


def index_lines(digests: Sequence[FileDigest], num_proc: int = 1, cache_dir: str | None = None) -> Dataset:
    """A memory-mapped table of all non-blank lines of the files that `content_digests` returned.

    Columns: `file`, `line` (from 1), `start` (byte offset) and `digest`, 64 bits over path, line number and the line's
    bytes. Only b"\\n" ends a line, because a JSON string may contain other line separators, such as U+2028. The table
    is cached by the files' paths and content digests. Raises UserError if all lines are blank, a file has changed since
    it was digested, or the package datasets is missing.
    """
    with extra("train"):
        from datasets import Dataset, Features, Value
        from datasets.exceptions import DatasetGenerationError

    from longspec.data.cache import cache_folder, cached_table

    # Only the first line is read, so its file cannot be compared with its digest yet.
    unverified = [FileDigest(file.path, "") for file in digests]
    if next(_lines(unverified), None) is None:
        names = ", ".join(file.path for file in digests[:3])
        raise UserError(f"no record in {names}{' …' if len(digests) > 3 else ''}: all lines are blank")
    workers = min(num_proc, len(digests))

    features = Features({name: Value(dtype) for name, dtype in LINE_COLUMNS.items()})

    def build(folder: str) -> None:
        try:
            Dataset.from_generator(
                _lines,
                features=features,
                cache_dir=folder,
                gen_kwargs={"files": list(digests)},
                num_proc=workers if workers > 1 else None,
            )
        # datasets wraps every exception of the generator.
        except DatasetGenerationError as error:
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from error
            raise

    # The paths are part of the name, because they are a column of the table.
    name = content_hash(json.dumps([VERSION, digests]).encode()).hexdigest()
    return cached_table(cache_folder(cache_dir) / f"lines-{name}", build)


def _lines(files: list[FileDigest]) -> Iterator[dict[str, Any]]:
    """The non-blank lines of `files`, as rows of LINE_COLUMNS.

    Raises UserError at the end of a file whose bytes do not have the digest. An empty digest is not compared.
    """
    for path, expected in files:
        # The digest covers the bytes that are indexed here, not those of a second read.
        whole = content_hash()
        with open(path, "rb") as handle:
            start = 0
            for number, raw in enumerate(handle, 1):
                whole.update(raw)
                if raw.strip():
                    yield {"file": path, "line": number, "start": start, "digest": _line_digest(path, number, raw)}
                # In bytes, so that `read_lines` can seek in files of any encoding.
                start += len(raw)
        if expected and whole.hexdigest() != expected:
            raise _changed(path)


def _line_digest(path: str, number: int, raw: bytes) -> int:
    # Two equal lines at different places are two samples, so the place is part of the digest.
    digest = hashlib.blake2b(f"{path}\0{number}\0".encode(errors="surrogateescape"), digest_size=8)
    digest.update(raw)
    return int.from_bytes(digest.digest(), "little", signed=True)


def _changed(path: str) -> UserError:
    return UserError(f"data file '{path}' changed while it was read; start again once nothing writes to it")


def read_lines(index: dict[str, list]) -> Iterator[tuple[str, int, bytes]]:
    """File, line number and bytes of each row of `index_lines`. Raises UserError for a line that has changed since."""
    rows = zip(*(index[name] for name in ("file", "line", "start", "digest")), strict=True)
    for path, own in groupby(rows, itemgetter(0)):
        with open(path, "rb") as handle:
            for _, number, start, digest in own:
                handle.seek(start)
                raw = handle.readline()
                if _line_digest(path, number, raw) != digest:
                    raise _changed(path)
                yield path, number, raw
