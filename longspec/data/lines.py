"""Data files: their content digests, and their lines in chunks."""

import glob
import os
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain, islice
from pathlib import Path
from typing import Any

from longspec.digests import file_digests
from longspec.errors import UserError

Files = str | Path | Iterable[str | Path]
"""One or more files, folders or glob patterns."""

SUFFIXES = (".jsonl", ".ndjson", ".json")
"""Suffixes of JSONL files, in any case."""
CHUNK_BYTES = 1 << 18
"""Bytes after which a chunk ends with its line. They are tokenized in about 0.1 s, so all processes end together."""
FIRST_LINES = 256
"""Lines that stand for all of them; files of records mostly have the same fields throughout."""
Line = tuple[str, int, bytes]
"""A line's file, its number from 1, and its bytes."""


def data_files(files: Files) -> list[str]:
    """The files of a file, a folder (recursively), a glob pattern, or a list of these. Raises UserError for none."""
    names = [files] if isinstance(files, str | Path) else list(files)
    if not names:
        raise UserError("no data files given: name at least one .jsonl file, folder or pattern")
    paths: list[str] = []
    for name in map(str, names):
        if not (matches := _matching_files(name)):
            raise UserError(f"no data file at '{name}': give a .jsonl file, a folder of them, or a pattern")
        paths += matches
    return paths


def _matching_files(name: str) -> list[str]:
    if os.path.isfile(name):
        return [name]
    if os.path.isdir(name):
        inside = sorted(Path(name).rglob("*"))
        return [str(path) for path in inside if path.suffix.lower() in SUFFIXES and path.is_file()]
    return sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))


def content_digests(files: Files) -> list[list[str]]:
    """The absolute path and the digest of each data file, in the order of `data_files(files)`.

    Every byte is read, because neither size nor modification time proves that a file is unchanged. Equal digests in
    order are the same data, whatever the paths. Raises UserError for a missing or unreadable file.
    """
    paths = [os.path.abspath(path) for path in data_files(files)]
    return [list(entry) for entry in zip(paths, file_digests(paths), strict=True)]


def text_lines(path: str) -> Iterator[Line]:
    """The non-blank lines of a file."""
    with open(path, "rb") as handle:
        yield from ((path, number, raw) for number, raw in enumerate(handle, 1) if raw.strip())


def first_lines(paths: Sequence[str]) -> list[Line]:
    """The first FIRST_LINES lines of some files that are not blank. Raises UserError if there is none."""
    if not (lines := list(islice(chain.from_iterable(map(text_lines, paths)), FIRST_LINES))):
        raise UserError(f"no record in {named(paths)}: all lines are blank")
    return lines


def named(paths: Sequence[str]) -> str:
    """Some files in an error message: the first one, and whether there are others."""
    return paths[0] + (" …" if len(paths) > 1 else "")


def chunks(files: Iterable[str]) -> Iterator[dict[str, Any]]:
    """The files in chunks of lines: `path`, number of the first `line` from 1, `start` and `size` in bytes."""
    for path in files:
        number, start = 1, 0
        with open(path, "rb") as handle:
            while lines := handle.readlines(CHUNK_BYTES):
                size = sum(map(len, lines))
                yield {"path": path, "line": number, "start": start, "size": size}
                number, start = number + len(lines), start + size


def read_chunk(path: str, line: int, start: int, size: int) -> Iterator[Line]:
    """The non-blank lines of a chunk."""
    with open(path, "rb") as handle:
        handle.seek(start)
        # A JSON string may contain other line separators, such as U+2028.
        lines = handle.read(size).split(b"\n")
    yield from ((path, number, raw) for number, raw in enumerate(lines, line) if raw.strip())


def check_unchanged(digests: Sequence[Sequence[str]]) -> None:
    """Raise UserError for a file that differs from its entry in `content_digests`."""
    for (path, before), after in zip(digests, file_digests(path for path, _ in digests), strict=True):
        if after != before:
            raise UserError(f"data file '{path}' changed while it was read; start again once nothing writes to it")
