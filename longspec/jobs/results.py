"""JSONL files of results with one line per item, which an interrupted run continues.

In a launch of several ranks, rank 0 writes to the file and each other rank to a part file next to it, whose lines rank
0 collects.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path
from typing import IO, Any

from longspec.errors import UserError, os_errors
from longspec.locks import locked_file
from longspec.replacing import replacing

Line = dict[str, Any]
"""A line of results. Its entry "index" is the number of its item."""
ReadLine = Callable[[bytes], Line]
"""Checks a line of a file, and returns its entries that stay in memory. Raises ValueError, with the problem, for a line
that the run does not write."""

ADVICE = "choose another output, or replace these results with --overwrite"


class Results:
    """The lines of a file. They are only appended, several whole lines or none.

    An incomplete last line of a process that was killed does not count, and the first `add` removes it.
    """

    def __init__(
        self,
        path: Path,
        read_line: ReadLine,
        resume: bool = True,
        done: Iterable[int] = (),
        on_start: Callable[[], object] = lambda: None,
    ) -> None:
        """Read the file, if it exists, without changing it. Raises UserError for complete lines of anything else.

        resume: whether the lines on disk belong to the run; otherwise the first `add` removes them. done: the items
        that have a line in another file. on_start: called before the first line is written, once the lines of other
        runs are removed.
        """
        self.path = path
        self.lines: list[Line] = []
        """The lines in this file, as far as they stay in memory."""
        self.done = set(done)
        """The items that have a line."""
        self._read_line = read_line
        self._resume = resume
        self._on_start = on_start
        self._size = 0
        """Number of bytes in the complete lines on disk."""
        self._has_started = False
        if resume and path.exists():
            with path.open("rb") as stream:
                for line, raw in self._complete_lines(stream, path):
                    self._note(line)
                    self._size += len(raw)

    def add(self, line: Line) -> None:
        """Append a line. Raises UserError if it cannot be written; the earlier ones stay intact."""
        self._append([json_bytes(line) + b"\n"])

    def start(self) -> None:
        """Remove everything that does not belong to the run, before the first line is written. Raises UserError."""
        with self._writing():
            if self.path.exists():
                # Not removed, because a lock on the file must stay.
                os.truncate(self.path, self._size)
            for path in () if self._resume else part_paths(self.path):
                path.unlink()
            self._on_start()
        self._has_started = True

    def collect(self, wait: bool = False) -> None:
        """Append the lines in the part files of other ranks, and remove these files.

        wait: whether to wait for ranks that have not closed their files yet. Otherwise such a rank raises UserError, as
        do lines of another run and lines that cannot be written.
        """
        with all_parts(self.path, wait) as parts:
            for part in parts:
                path = Path(part.name)
                # A line may be here already: a process was killed before it removed the part.
                self._append([raw for line, raw in self._complete_lines(part, path) if line["index"] not in self.done])
                # After the append: a crash in between leaves lines twice, and the next run skips them.
                path.unlink()

    def put_in_order(self) -> None:
        """Rewrite the file in the order of items, because ranks and batches finish in any order. Raises UserError."""
        order = [line["index"] for line in self.lines]
        if order == sorted(order):
            return
        by_item = sorted(range(len(order)), key=order.__getitem__)
        with self._writing():
            # A link stays a link.
            path = self.path.resolve()
            raw_lines = path.read_bytes().split(b"\n")
            with replacing(path) as unfinished:
                unfinished.write_bytes(b"".join(raw_lines[number] + b"\n" for number in by_item))
        self.lines = [self.lines[number] for number in by_item]

    def _complete_lines(self, stream: IO[bytes], path: Path) -> Iterator[tuple[Line, bytes]]:
        """The lines of a file, read and raw, without an incomplete last one. Raises UserError."""
        seen: set[int] = set()
        for number, raw in enumerate(stream, 1):
            if not raw.endswith(b"\n"):
                return
            try:
                line = self._read_line(raw)
                if line["index"] in seen:
                    raise ValueError("a second line of the same item")
            except ValueError as error:
                raise UserError(f"{path}, line {number}: {error}; {ADVICE}") from error
            seen.add(line["index"])
            yield line, raw

    def _note(self, line: Line) -> None:
        self.lines.append(line)
        self.done.add(line["index"])

    def _append(self, raw_lines: list[bytes]) -> None:
        """Append all lines or none. Raises UserError."""
        if not self._has_started:
            self.start()
        with self._writing(), self.path.open("ab", buffering=0) as stream:
            try:
                # An unbuffered write may take only part of the bytes.
                rest = memoryview(b"".join(raw_lines))
                while rest:
                    rest = rest[stream.write(rest) :]
                os.fsync(stream.fileno())
            except OSError:
                # Half a batch would count as done when the run continues.
                stream.truncate(self._size)
                raise
        for raw in raw_lines:
            self._size += len(raw)
            self._note(self._read_line(raw))

    def _writing(self) -> AbstractContextManager[None]:
        """Turn an OSError into a UserError."""
        saved = f"{len(self.lines)} results are saved; the same command continues once this is fixed"
        return os_errors(f"{self.path}: cannot be written", saved)


def resume_results(
    path: Path, read_line: ReadLine, overwrite: bool, on_start: Callable[[], object] = lambda: None
) -> Results:
    """The results of a run on rank 0, with the lines that ranks of an interrupted launch left in part files.

    overwrite: whether the first new line replaces all earlier ones. Raises UserError for lines of another run, and if
    a rank of an earlier launch still writes.
    """
    results = Results(path, read_line, resume=not overwrite, on_start=on_start)
    if overwrite:
        with all_parts(path):
            pass
    else:
        results.collect()
    return results


def json_bytes(content: Any, indent: int | None = None) -> bytes:
    """JSON in UTF-8. A lone surrogate, which UTF-8 cannot encode, becomes its JSON escape."""
    return json.dumps(content, indent=indent, ensure_ascii=False).encode("utf-8", "backslashreplace")


def part_path(file: Path, rank: int) -> Path:
    return file.with_name(f"{file.name}.rank-{rank}")


def part_paths(file: Path) -> list[Path]:
    """The part files of `file` that exist."""
    prefix = part_path(file, 0).name[:-1]
    try:
        return sorted(path for path in file.parent.iterdir() if path.name.startswith(prefix))
    except FileNotFoundError:
        return []


@contextmanager
def all_parts(file: Path, wait: bool = False) -> Iterator[Sequence[IO[bytes]]]:
    """The parts of `file`, opened for reading and locked.

    If a rank still writes to one of them, as when rank 0 of a run was killed and the others go on, this raises
    UserError, or with `wait` it waits for the rank to close the file.
    """
    with ExitStack() as stack:
        yield [stack.enter_context(locked_file(path, "rb", wait)) for path in part_paths(file)]
