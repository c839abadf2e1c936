"""What `longspec generate` writes apart from its output file: lines on stdout, and the summary."""

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from longspec.errors import UserError
from longspec.inference.detokenizer import printable
from longspec.jobs.results import Line, json_bytes
from longspec.replacing import write_atomically


class StdoutLines:
    """Results on stdout in the order of prompts, where a line waits for all earlier ones. A terminal gets texts."""

    def __init__(self, numbers: Sequence[int]) -> None:
        """numbers: the numbers of all prompts, in order."""
        self.done: set[int] = set()
        """The prompts that have an answer."""
        self._waiting: dict[int, Line] = {}
        self._is_one = len(numbers) == 1
        self._missing = list(reversed(numbers))

    def add(self, line: Line) -> None:
        """Take a new line, and print those whose turn it is. Raises UserError if stdout cannot be written."""
        self._waiting[line["index"]] = line
        self.done.add(line["index"])
        while self._missing and self._missing[-1] in self._waiting:
            self._print(self._waiting.pop(self._missing.pop()))

    def put_in_order(self) -> None:
        """Print the rest after a stop signal."""
        for _, line in sorted(self._waiting.items()):
            self._print(line)

    def _print(self, line: Line) -> None:
        stdout = sys.stdout.buffer
        try:
            stdout.write((self._text(line).encode() if stdout.isatty() else json_bytes(line)) + b"\n")
            stdout.flush()
        except BrokenPipeError:
            raise  # nobody reads stdout any more; `app.main` ends the command
        except OSError as error:
            raise UserError(f"stdout: cannot be written ({error.strerror})") from error

    def _text(self, line: Line) -> str:
        """An answer for a terminal, below the number of its prompt if there are several."""
        text = printable(line["text"].strip()) + (" ..." if line["finish_reason"] == "length" else "")
        return text if self._is_one else f"prompt {line['index'] + 1}\n{text}\n"


def check_folder(path: Path | None, option: str, others: Sequence[str | Path | None] = ()) -> None:
    """Raise UserError if a file that an option names is a folder, if its folder does not exist, and if it is one of
    `others`, the files that the command reads or writes as well."""
    if path is None or str(path) == "-":
        return
    if os.path.realpath(path) in [os.path.realpath(other) for other in others if other is not None]:
        raise UserError(f"{option} {path}: the command also reads or writes this file; give another one")
    if not path.absolute().parent.is_dir():
        raise UserError(f"{option} {path}: there is no folder {path.parent}")
    if os.path.isdir(path):
        raise UserError(f"{option} {path}: a folder; give a file")


def write_summary(summary: dict[str, Any], path: Path | None) -> None:
    """Write a line of JSON to a file, atomically, to stderr for "-", or nowhere for None. Raises UserError."""
    if str(path) == "-":
        print(json.dumps(summary), file=sys.stderr)
    elif path is not None:
        write_atomically(path, json.dumps(summary) + "\n")
