"""JSONL files of results with one line per item, which an interrupted run continues.

In a launch of several ranks, rank 0 writes to the file and each other rank to a part file next to it. Rank 0 merges
them at the end.
"""

import glob
import json
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cached_property
from io import FileIO
from pathlib import Path
from typing import Any

from longspec.errors import UserError, os_errors
from longspec.replacing import replacing

Line = dict[str, Any]
"""A line of results. Its entry "index" is the number of its item."""
ReadLine = Callable[[bytes], Line]
"""Checks a line of a file, and returns its entries that stay in memory. Raises ValueError, with the problem, for a line
that the run does not write."""

ADVICE = "choose another output, or replace these results with --overwrite"


class Results:
    """The results of a run. Each rank appends lines to a file; an incomplete last line does not count."""

    def __init__(self, path: Path, read_line: ReadLine, overwrite: bool = False, rank: int = 0) -> None:
        """On rank 0, read the files of all ranks. Raises UserError for complete lines of anything else.

        overwrite: whether earlier results are not read, and `start` removes them.
        """
        self.path = path
        self.file = part_path(path, rank) if rank else path
        """The file of this rank."""
        self.lines: dict[int, Line] = {}
        """The lines by item, as far as they stay in memory."""
        self.done: set[int] = set()
        """The items that have a line."""
        self._read_line = read_line
        self._overwrites = overwrite
        if rank == 0 and not overwrite:
            self._read()

    def start(self) -> None:
        """Remove what does not belong to the run, before the first line is written. Raises UserError."""
        with self._writing():
            if self._overwrites:
                for path in part_paths(self.path):
                    path.unlink()
            # Not removed, because a lock on the file must stay.
            self._stream.truncate(0 if self._overwrites else self.file.read_bytes().rfind(b"\n") + 1)

    def add(self, line: Line) -> None:
        """Append a line. Raises UserError if it cannot be written; the earlier ones stay intact."""
        raw = json_bytes(line) + b"\n"
        with self._writing():
            rest = memoryview(raw)
            while rest:  # an unbuffered write may take only a part
                rest = rest[self._stream.write(rest) :]
            os.fsync(self._stream.fileno())
        self._note(self._read_line(raw))

    def put_in_order(self) -> None:
        """Merge the files of all ranks, which have finished, in the order of items. On rank 0. Raises UserError."""
        raw_lines = self._read()
        parts = part_paths(self.path)
        if not parts and list(raw_lines) == sorted(raw_lines):
            return
        with self._writing():
            # A link stays a link.
            with replacing(self.path.resolve()) as unfinished:
                unfinished.write_bytes(b"".join(raw_lines[item] for item in sorted(raw_lines)))
            # A crash in between leaves lines twice, of which the next run reads one.
            for part in parts:
                part.unlink()

    def _read(self) -> dict[int, bytes]:
        """The complete lines in the files of all ranks, by item. Raises UserError."""
        raw_lines: dict[int, bytes] = {}
        for path in (*filter(Path.exists, [self.path]), *part_paths(self.path)):
            with os_errors(f"{path}: cannot be read"):
                content = path.read_bytes()
            for number, raw in enumerate(content.split(b"\n")[:-1], 1):
                try:
                    line = self._read_line(raw)
                except ValueError as error:
                    raise UserError(f"{path}, line {number}: {error}; {ADVICE}") from error
                raw_lines.setdefault(line["index"], raw + b"\n")
                self._note(line)
        return raw_lines

    def _note(self, line: Line) -> None:
        self.lines[line["index"]] = line
        self.done.add(line["index"])

    @cached_property
    def _stream(self) -> FileIO:
        # Kept open: if this rank outlives its run, a later run removes the file and does not get its lines.
        return self.file.open("ab", buffering=0)

    def _writing(self) -> AbstractContextManager[None]:
        """Turn an OSError into a UserError."""
        saved = f"{len(self.lines)} results are saved; the same command continues once this is fixed"
        return os_errors(f"{self.file}: cannot be written", saved)


def json_bytes(content: Any, indent: int | None = None) -> bytes:
    """JSON in UTF-8. A lone surrogate, which UTF-8 cannot encode, becomes its JSON escape."""
    return json.dumps(content, indent=indent, ensure_ascii=False).encode("utf-8", "backslashreplace")


def part_path(file: Path, rank: int) -> Path:
    return file.with_name(f"{file.name}.rank-{rank}")


def part_paths(file: Path) -> list[Path]:
    """The part files of `file` that exist."""
    return sorted(file.parent.glob(f"{glob.escape(file.name)}.rank-*"))
