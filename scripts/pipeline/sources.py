"""Python source files and the packages that they belong to."""

import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

HELD_OUT = ("concurrent", "dbm", "http", "json", "tomllib", "wsgiref", "xmlrpc", "zoneinfo")
"""Packages of the standard library that no training file comes from. Each has several files, so that it can be asked
about as a repository."""
LEFT_OUT = {
    *("site-packages", "dist-packages", "lib-dynload", "__pycache__"),  # not the library's own sources
    *("test", "tests", "idle_test"),  # many installations come without them
    *("encodings", "pydoc_data"),  # tables and prose
}
SHORTEST_FILE = 400
"""Characters."""


@dataclass(frozen=True)
class SourceFile:
    """A file: its path below the library's folder, and its text under a line with that path."""

    path: str
    text: str

    @property
    def package(self) -> str:
        """The top-level package or module, by which files are split."""
        return Path(self.path).parts[0].removesuffix(".py")


def heading(path: str) -> str:
    """The line that stands above a file's text."""
    return f"# Path: {path}\n"


def library_files() -> list[SourceFile]:
    """The running Python's standard library, in order of path."""
    files = python_files(Path(sysconfig.get_paths()["stdlib"]), LEFT_OUT)
    return [file for file in files if not file.path.startswith(("_sysconfigdata", "config-"))]


def python_files(root: Path, left_out: Iterable[str]) -> Iterator[SourceFile]:
    """The Python files below `root`, in order of path, but short ones and those in a folder of `left_out`."""
    left_out = set(left_out)
    for path in sorted(root.rglob("*.py")):
        below = path.relative_to(root)
        if path.is_file() and not left_out.intersection(below.parts):
            text = path.read_text(encoding="utf-8", errors="ignore")
            if len(text) >= SHORTEST_FILE:
                yield SourceFile(below.as_posix(), heading(below.as_posix()) + text)


def by_package(files: Iterable[SourceFile]) -> dict[str, list[SourceFile]]:
    packages: dict[str, list[SourceFile]] = defaultdict(list)
    for file in files:
        packages[file.package].append(file)
    return packages


def line_after(text: str, place: int) -> int:
    """Where the first line that is not blank begins after `place`, a character of `text` with a line's end after it."""
    cut = text.index("\n", place) + 1
    return len(text) - len(text[cut:].lstrip("\n"))


def whole_lines(text: str) -> str:
    """`text` without a last line that was cut off."""
    return text[: text.rfind("\n") + 1]


def up_to(files: Iterable[SourceFile], characters: int) -> list[SourceFile]:
    """The first files, with no more than so many characters in all, but one at least."""
    kept: list[SourceFile] = []
    size = 0
    for file in files:
        size += len(file.text)
        if kept and size > characters:
            break
        kept.append(file)
    return kept
