"""The JSONL output of `longspec generate`, in prompt order. An interrupted file is continued."""

from __future__ import annotations

import fcntl
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from longspec.cli.prompts import Prompt
from longspec.errors import UserError


class Results:
    """Writes the line of each prompt as soon as the lines of all earlier prompts are written."""

    def __init__(self, path: Path | None, stream: IO[bytes], prompts: Sequence[Prompt]) -> None:
        """path: None is stdout, where there is nothing to continue. Use `open_results`."""
        self.path = path
        self.prompts = prompts
        self.done = 0
        """Number of written lines."""
        self._stream = stream
        self._waiting: dict[int, dict[str, Any]] = {}
        self._run = ""

    def resume(self, run: str, overwrite: bool = False) -> None:
        """Keep the complete lines of an earlier run, and remove the rest; with `overwrite` remove all.

        run: a digest of everything that determines the answers. Raises UserError for lines of other prompts or of a
        different run.
        """
        self._run = run
        if self.path is None:
            return
        size = 0
        self._stream.seek(0)
        for number, raw in enumerate(() if overwrite else self._stream, 1):
            if not raw.endswith(b"\n"):
                break
            if problem := self._problem(raw):
                raise UserError(
                    f"--output {self.path}, line {number}: {problem}; give another file, or --overwrite to replace it"
                )
            self.done = number
            size += len(raw)
        self._stream.truncate(size)

    def _problem(self, raw: bytes) -> str | None:
        """The reason why a line is not the next one of this run; None if it is."""
        try:
            line = json.loads(raw)
        except ValueError:
            line = None
        if not isinstance(line, dict) or not {"index", "text", "run"} <= line.keys():
            return "not a line that this command writes"
        if self.done == len(self.prompts) or any(line.get(name) != value for name, value in self._head().items()):
            return "belongs to another prompt"
        return None if line["run"] == self._run else "was written by another pair or with other options"

    def _head(self) -> dict[str, Any]:
        """The fields of the next line that come before its answer."""
        return {"index": self.done, **self.prompts[self.done].record}

    def add(self, number: int, answer: dict[str, Any]) -> None:
        """Accept the answer to a prompt, and write it with the later lines that waited for it.

        Raises UserError on a full disk.
        """
        self._waiting[number] = answer
        while self.done in self._waiting:
            line = self._head() | self._waiting.pop(self.done) | {"run": self._run}
            try:
                self._stream.write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
                self._stream.flush()
            except BrokenPipeError:
                raise
            except OSError as error:
                raise UserError(
                    f"{self.path or 'stdout'}: cannot be written ({error.strerror}) after {self.done} answers"
                ) from error
            self.done += 1


@contextmanager
def open_results(path: Path | None, prompts: Sequence[Prompt]) -> Iterator[Results]:
    """Results in a file, locked against other processes, or on stdout. Raises UserError if it cannot be written."""
    if path is None:
        yield Results(None, sys.stdout.buffer, prompts)
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stream = path.open("a+b")
    except OSError as error:
        raise UserError(f"--output {path}: cannot be written ({error.strerror})") from error
    with stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise UserError(
                f"--output {path}: cannot be locked ({error.strerror}); is another run writing it?"
            ) from error
        yield Results(path, stream, prompts)


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
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        unfinished.write_text(line + "\n")
        os.replace(unfinished, path)
    except OSError as error:
        raise UserError(f"--json {path}: cannot be written ({error.strerror})") from error
