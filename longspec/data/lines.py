"""Data files and their lines: content digests, and blocks of lines that are read in any order."""

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from longspec.digests import content_hash, file_digests
from longspec.errors import UserError

Files = str | Path | Iterable[str | Path]
"""One or more files, folders or glob patterns."""

SUFFIXES = (".jsonl", ".ndjson", ".json")
"""Suffixes of JSONL files, in any case."""


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


class Block(NamedTuple):
    """Successive lines of a data file."""

    path: str
    line: int
    """Number of the first line, from 1."""
    start: int
    """Offset in bytes. Not in characters, because `read_lines` seeks."""
    size: int
    """Number of bytes."""
    digest: str
    """That of the bytes."""


def line_blocks(files: Sequence[FileDigest], count: int) -> Iterator[Block]:
    """All lines of the files that `content_digests` returned, in blocks of at most `count` lines.

    Raises UserError at the end of a file that has changed since it was digested, and at the end if all lines are blank.
    """
    is_blank = True
    for path, expected in files:
        # The digest covers the bytes of the blocks, not those of a second read.
        whole, number, start = content_hash(), 1, 0
        with open(path, "rb") as handle:
            while own := list(islice(handle, count)):
                raw = b"".join(own)
                whole.update(raw)
                is_blank &= not raw.strip()
                yield Block(path, number, start, len(raw), content_hash(raw).hexdigest())
                number, start = number + len(own), start + len(raw)
        if whole.hexdigest() != expected:
            raise _changed(path)
    if is_blank:
        names = ", ".join(file.path for file in files[:3])
        raise UserError(f"no record in {names}{' …' if len(files) > 3 else ''}: all lines are blank")


def read_lines(blocks: Iterable[Block]) -> Iterator[tuple[str, int, bytes]]:
    """File, line number and bytes of each non-blank line. Raises UserError for a block that has changed since.

    Only b"\n" ends a line, because a JSON string may contain other line separators, such as U+2028.
    """
    for path, first, start, size, digest in blocks:
        with open(path, "rb") as handle:
            handle.seek(start)
            raw = handle.read(size)
        if content_hash(raw).hexdigest() != digest:
            raise _changed(path)
        for number, line in enumerate(raw.split(b"\n"), first):
            if line.strip():
                yield path, number, line


def _changed(path: str) -> UserError:
    return UserError(f"data file '{path}' changed while it was read; start again once nothing writes to it")
