"""The JSONL output of `longspec generate`, in prompt order. An interrupted file is continued.

In a launch of several ranks, each rank writes its answers as they come: rank 0 to the output, the others to part files,
whose lines rank 0 collects. The lines are put in order at the end.
"""

from __future__ import annotations

import fcntl
import json
import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from longspec.cli.prompts import Prompt
from longspec.errors import UserError
from longspec.parts import all_parts, complete_lines, open_part, part_paths, write_in_order
from longspec.replacing import replacing


class Results:
    """Writes a line per prompt: once the lines of all earlier prompts are written, or at once among several ranks."""

    def __init__(
        self, path: Path | None, stream: IO[bytes], prompts: Sequence[Prompt], is_alone: bool = True, run: str = ""
    ) -> None:
        """path: None is stdout, where there is nothing to continue. Use `open_results` or `open_part_results`.

        is_alone: whether this process answers all prompts. run: a digest of everything that determines the answers.
        """
        self.path = path
        self.prompts = prompts
        self.order: list[int] = []
        """The numbers of the prompts that have a line in this file, in order of lines."""
        self.done: set[int] = set()
        """The numbers of the prompts that have a line in any file."""
        self._stream = stream
        self._is_alone = is_alone
        self._next = 0
        """The first prompt without a line."""
        self._waiting: dict[int, dict[str, Any]] = {}
        self._run = run

    def resume(self, run: str, overwrite: bool = False) -> None:
        """Keep the complete lines of an earlier run, and remove the rest; with `overwrite` remove all.

        run: a digest of everything that determines the answers. Raises UserError for lines of other prompts or of a
        different run.
        """
        self._run = run
        if self.path is None:
            return
        size = 0
        for number, raw in enumerate(() if overwrite else complete_lines(self._stream), 1):
            self._note(self._number(raw, f"--output {self.path}, line {number}", self.done))
            size += len(raw)
        with all_parts(self.path):
            self._stream.truncate(size)
            for part in part_paths(self.path) if overwrite else ():
                part.unlink()
        self.collect()

    def collect(self, wait: bool = False) -> None:
        """Append the lines in the part files of other ranks, and remove these files. Needs a path.

        wait: whether to wait for ranks that still write to their files; without it, such a rank is a UserError. Raises
        UserError also for lines of other prompts or of a different run, and if the lines cannot be written.
        """
        assert self.path is not None
        with all_parts(self.path, wait) as parts:
            for part in parts:
                for number, raw in enumerate(complete_lines(part), 1):
                    prompt = self._number(raw, f"{part.name}, line {number}")
                    if prompt not in self.done:  # or it was collected before rank 0 was killed
                        self._write(prompt, raw)
                Path(part.name).unlink()

    def _number(self, raw: bytes, location: str, earlier: Collection[int] = ()) -> int:
        """The number of a line's prompt. Raises UserError for a line that this run does not write after `earlier`."""
        if problem := self._problem(raw, earlier):
            raise UserError(f"{location}: {problem}; give another file, or --overwrite to replace it")
        return int(json.loads(raw)["index"])

    def _problem(self, raw: bytes, earlier: Collection[int]) -> str | None:
        """The reason why a line does not belong to this run; None if it does."""
        try:
            line = json.loads(raw)
        except ValueError:
            line = None
        if not isinstance(line, dict) or not {"index", "text", "run"} <= line.keys():
            return "not a line that this command writes"
        index = line["index"]
        is_known = isinstance(index, int) and 0 <= index < len(self.prompts) and index not in earlier
        if not is_known or any(line.get(name) != value for name, value in self._head(index).items()):
            return "belongs to another prompt"
        return None if line["run"] == self._run else "was written by another pair or with other options"

    def _head(self, number: int) -> dict[str, Any]:
        """The fields of a line that come before its answer."""
        return {"index": number, **self.prompts[number].record}

    def add(self, number: int, answer: dict[str, Any]) -> None:
        """Accept the answer to a prompt, and write it, with the later lines that waited for it.

        Raises UserError on a full disk.
        """
        self._waiting[number] = answer
        for ready in sorted(self._waiting):
            # The lines of several ranks are put in order at the end.
            if self._is_alone and ready > self._next:
                return
            line = self._head(ready) | self._waiting.pop(ready) | {"run": self._run}
            self._write(ready, json.dumps(line, ensure_ascii=False).encode() + b"\n")

    def _write(self, number: int, raw: bytes) -> None:
        try:
            # A line is on disk as soon as its answer is known, so a crash loses no earlier one.
            self._stream.write(raw)
            self._stream.flush()
        except BrokenPipeError:
            raise  # nobody reads stdout any more; `app.main` ends the command
        except OSError as error:
            raise UserError(
                f"{self.path or 'stdout'}: cannot be written ({error.strerror}) after {len(self.done)} answers"
            ) from error
        self._note(number)

    def _note(self, number: int) -> None:
        self.order.append(number)
        self.done.add(number)
        while self._next in self.done:
            self._next += 1

    def finish(self) -> None:
        """Put the lines in the order of the prompts if all have one. Raises UserError if the file cannot be written."""
        if self.path is None or len(self.order) < len(self.prompts) or self.order == sorted(self.order):
            return
        try:
            write_in_order(self.path.resolve(), self.order)
        except OSError as error:
            raise UserError(f"--output {self.path}: cannot be put in order ({error.strerror})") from error
        self.order.sort()


@contextmanager
def open_part_results(path: Path, rank: int, prompts: Sequence[Prompt], run: str, done: set[int]) -> Iterator[Results]:
    """The results of a rank other than 0, in a locked part file. run, done: those of rank 0's results."""
    with open_part(path, rank) as stream:
        results = Results(path, stream, prompts, is_alone=False, run=run)
        results.done |= done
        yield results


@contextmanager
def open_results(path: Path | None, prompts: Sequence[Prompt], is_alone: bool = True) -> Iterator[Results]:
    """Results in a file, locked against other processes, or on stdout. Raises UserError if it cannot be written.

    is_alone: whether no other rank answers prompts.
    """
    if path is None:
        yield Results(None, sys.stdout.buffer, prompts)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a+b")  # earlier lines stay until `resume` has checked them
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})") from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"--output {path}: cannot be locked ({error.strerror}); is another run writing it?"
            ) from error
        yield Results(path, stream, prompts, is_alone)


def check_folder(path: Path | None, option: str) -> None:
    """Raise UserError if the folder of a file that an option names does not exist."""
    if path is not None and not path.absolute().parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}")


def write_summary(summary: dict[str, Any], path: Path | None) -> None:
    """Write one line of JSON to a file, atomically, or to stderr for "-". None writes nothing.

    Raises UserError for a file that cannot be written.
    """
    if path is None:
        return
    line = json.dumps(summary, ensure_ascii=False)
    if str(path) == "-":
        print(line, file=sys.stderr)
        return
    # A reader never sees a part of the summary.
    try:
        with replacing(path) as unfinished:
            unfinished.write_text(line + "\n")
    except OSError as error:
        raise UserError(f"--json {path}: cannot be written ({error.strerror})") from error
