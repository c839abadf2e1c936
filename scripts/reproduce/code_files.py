"""The code of the corpus: sources of the standard library and of the installed packages, split by package."""

import hashlib
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from scripts.pipeline.sources import HELD_OUT, SourceFile, by_package, library_files, python_files

COPIES = {"_vendor", "_vendored", "vendor", "vendored", "third_party", "externals", "__pycache__"}
"""Folders in which packages keep other packages."""
TESTS = {"test", "tests", "testing"}
"""Repetitive: good enough to train on, no prompts to be asked about."""
LONGEST_LINE = 2000
GENERATED = "DO NOT EDIT"
LETTERS = 0.4
"""The share of letters among what is no white space, under which a file is a table. Half of all files have over 0.8."""
TELLING_LINE = 30
"""Characters of a line that is hardly written twice by chance."""
COPIED = 0.25
"""The share of its telling lines in held-out files, over which a training file is a copy."""


@dataclass(frozen=True)
class HoldOut:
    """Which installed packages are held out, besides HELD_OUT of the standard library."""

    packages: int
    least_files: int = 20
    long_file: int = 60_000
    """Characters of a file that the longest prompts can be cut from; a package has two of them at least."""
    largest_share: float = 0.04
    """Of all the text: training needs the largest packages."""


def installed_files() -> list[SourceFile]:
    """Sources of the standard library and of all installed packages, without copies, tables and generated files."""
    places = dict.fromkeys(sysconfig.get_paths()[kind] for kind in ("purelib", "platlib"))
    found = library_files()
    for place in places:
        found += python_files(Path(place), COPIES)
    return list(without_duplicates(file for file in found if is_written(file.text)))


def is_written(text: str) -> bool:
    """Whether somebody wrote this: no line is endless, and most of it are letters."""
    if GENERATED in text[:1000] or max(map(len, text.split("\n"))) > LONGEST_LINE:
        return False
    visible = "".join(text.split())
    return sum(map(str.isalpha, visible)) >= LETTERS * len(visible)


def without_duplicates(files: Iterable[SourceFile]) -> Iterator[SourceFile]:
    """The first of all files with the same text under their headings."""
    seen: set[str] = set()
    for file in files:
        body = file.text.split("\n", 1)[1]
        if body not in seen:
            seen.add(body)
            yield file


def split(files: Sequence[SourceFile], hold_out: HoldOut) -> tuple[list[SourceFile], list[SourceFile]]:
    """(training files, held-out files): no package is on both sides, nor is a copy of a held-out file in training."""
    chosen = set(held_out_packages(files, hold_out))
    held_out = [file for file in files if file.package in chosen]
    train = [file for file in files if file.package not in chosen]
    return list(without_copies(train, held_out)), [file for file in held_out if not is_test(file)]


def held_out_packages(files: Sequence[SourceFile], hold_out: HoldOut) -> list[str]:
    """The standard library's, and of the others that are large enough and not too large the first ones by hash."""
    total = sum(len(file.text) for file in files)
    fitting = []
    for name, members in by_package(files).items():
        asked = [len(member.text) for member in members if not is_test(member)]
        long = sum(size >= hold_out.long_file for size in asked)
        size = sum(len(member.text) for member in members)
        if len(asked) >= hold_out.least_files and long >= 2 and size <= hold_out.largest_share * total:
            fitting.append(name)
    fitting.sort(key=lambda name: hashlib.sha256(name.encode()).digest())
    return [*HELD_OUT, *[name for name in fitting if name not in HELD_OUT][: hold_out.packages]]


def is_test(file: SourceFile) -> bool:
    return bool(TESTS.intersection(Path(file.path).parts))


def without_copies(files: Iterable[SourceFile], held_out: Iterable[SourceFile]) -> Iterator[SourceFile]:
    """`files` without copies, changed or not: those of whose telling lines too many are lines of held-out files."""
    known = set().union(*(telling_lines(file.text) for file in held_out))
    for file in files:
        lines = telling_lines(file.text)
        if len(lines & known) <= COPIED * len(lines):
            yield file


def telling_lines(text: str) -> set[str]:
    body = text.split("\n")[1:]  # the heading differs
    return {stripped for line in body if len(stripped := line.strip()) >= TELLING_LINE}
