"""Source texts of the prompts: the user's prompts, benchmarks and documents, and installed Python code."""

import hashlib
import random
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from longspec.data.aligners import Turn
from longspec.data.prompts import PromptFiles
from longspec.data.record_fields import unread_note
from longspec.data.records import RecordError, read_records, text_of
from longspec.errors import UserError
from longspec.pipeline.settings import CodeSettings, Settings
from longspec.pipeline.target import CHAT_FORMAT, TargetText
from longspec.regenerate.settings import SPLITS

T = TypeVar("T")
VALIDATION_SHARE = 20
"""One in this number of training questions and meetings is used for validation."""
HELD_OUT_SHARE = 10
"""One in this number of packages and of the user's prompts is used for validation, and another one for the test."""
COPIES = {"__pycache__", "_vendor", "_vendored", "vendor", "vendored", "third_party", "externals", "extern"}
"""Names of folders that hold copies of other packages."""
TESTS = {"test", "tests", "testing", "idle_test"}
FILE_BYTES = (2_000, 300_000)
"""Minimum and maximum size of a source file."""
LONGEST_LINE = 1000
DISTINCTIVE_LINE = 30
"""Minimum characters of a distinctive line, one that is unlikely to be written twice independently."""
COPIED = 0.25
"""Maximum share of a training file's distinctive lines that may also occur in held-out files."""
LEAST_LETTERS = 0.4
"""Minimum share of letters among visible characters; files with fewer are tables of data."""


@dataclass(frozen=True)
class Meeting:
    transcript: str
    queries: tuple[str, ...]


@dataclass(frozen=True)
class SourceFile:
    package: str
    """Package of a source file, or collection of a document."""
    path: str
    """Path relative to the folder that contains the package."""
    text: str


@dataclass
class Texts:
    """The documents of one split, from which prompts are made."""

    questions: list[tuple[str, str]] = field(default_factory=list)
    """Questions of gsm8k, each with its worked answer."""
    meetings: list[Meeting] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    """Problems of AIME 2024."""
    documents: list[SourceFile] = field(default_factory=list)
    own: list[dict[str, Any]] = field(default_factory=list)
    """The user's prompts, each with "messages" or a "prefix"."""
    code: list[SourceFile] = field(default_factory=list)
    chats: list[list[Turn]] = field(default_factory=list)
    """Conversations of a user turn and the target's answer."""


def check_folders(settings: Settings) -> None:
    """Raise UserError for a folder of source texts that is missing."""
    code = [("code.folders", folder) for folder in settings.code.folders]
    for key, folder in [("benchmarks", settings.benchmarks), ("documents", settings.documents), *code]:
        if folder is not None and not Path(folder).is_dir():
            raise UserError(f"config key {key}: {folder}: no such folder")


def read_texts(folder: str | None, documents: str | None, split: str) -> Texts:
    """The records of a split, and the documents whose collection belongs to it. Tasks without a file are empty.

    A task's file is FOLDER/TASK/SPLIT.jsonl or FOLDER/TASK_SPLIT.jsonl. Training and validation share the file of the
    split train. Raises UserError for an invalid record.
    """
    texts = Texts()
    for file in sorted(Path(documents).glob("*/*.txt")) if documents else ():
        if split_of(file.parent.name) == split and (text := _read(file)) is not None:
            texts.documents.append(SourceFile(file.parent.name, f"{file.parent.name}/{file.name}", text))
    if folder is not None:
        questions = _read_task(folder, "gsm8k", split, _question)
        texts.questions = [one for one in questions if _belongs(one[0], split)]
        meetings = _read_task(folder, "qmsum", split, _meeting)
        texts.meetings = [one for one in meetings if _belongs(one.transcript, split)]
        if split == "test":
            texts.problems = _read_task(
                folder, "aime24", split, lambda record: text_of(record.get("problem"), "problem")
            )
    return texts


def _read_task(folder: str, task: str, split: str, read: Callable[[dict[str, Any]], T]) -> list[T]:
    """The records of a task's file, converted by `read`; [] if there is no file."""
    source = "test" if split == "test" else "train"
    files = [Path(folder, name) for name in (f"{task}/{source}.jsonl", f"{task}_{source}.jsonl")]
    return [record for file in files if file.is_file() for record in read_records(file, read)]


def _belongs(text: str, split: str) -> bool:
    """Whether a record belongs to a split among those that share its file."""
    return split == "test" or (_bucket(text) % VALIDATION_SHARE == 0) == (split == "validation")


def _question(record: dict[str, Any]) -> tuple[str, str]:
    return text_of(record.get("source"), "source"), text_of(record.get("target"), "target")


def _meeting(record: dict[str, Any]) -> Meeting:
    queries = record.get("queries")
    if not isinstance(queries, list) or not queries:
        raise RecordError("queries", "must be a list of queries")
    texts = tuple(text_of(one.get("query"), "queries.query") for one in queries)
    return Meeting(text_of(record.get("context"), "context"), texts)


def read_own(settings: Settings, target: TargetText) -> dict[str, list[dict[str, Any]]]:
    """The user's prompts of at most `prompts.contexts` tokens, by split. Raises UserError if none is left."""
    prompts: dict[str, list[dict[str, Any]]] = {split: [] for split in SPLITS}
    if not settings.text:
        return prompts
    files = PromptFiles(tuple(settings.text))
    if files.unread:
        print(f"--text: {unread_note(files.unread)}", flush=True)
    rejected: list[str] = []
    too_long = 0
    for prompt in files.read(0, len(files), target.family, target.tokenizer, CHAT_FORMAT, rejected):
        if target.count(prompt.text) > settings.prompts.contexts[1]:
            too_long += 1
            continue
        record = {"messages": prompt.turns} if prompt.turns else {"prefix": prompt.text}
        prompts[split_of(prompt.text)].append(record)
    limit = f"of at most {settings.prompts.contexts[1]} tokens"
    if rejected or too_long:
        first = f", the first one: {rejected[0]}" if rejected else ""
        print(
            f"--text: left out: {too_long} prompts not {limit}, {len(rejected)} by the chat template{first}", flush=True
        )
    if not prompts["train"]:
        raise UserError(f"--text: no prompt {limit} in {settings.text[0]}")
    return prompts


def _bucket(name: str) -> int:
    """A 32-bit hash that is the same in every process."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "big")


def split_of(name: str) -> str:
    """The split of a package by its name, or of a prompt by its text."""
    return {0: "test", 1: "validation"}.get(_bucket(name) % HELD_OUT_SHARE, "train")


def read_code(settings: CodeSettings, seed: int) -> dict[str, list[SourceFile]]:
    """Source files of packages, by split. Splits share no package."""
    paths = sysconfig.get_paths()
    folders = settings.folders or dict.fromkeys(paths[name] for name in ("stdlib", "purelib", "platlib"))
    chance = random.Random(seed)
    packages = [package for folder in folders for package in _packages(Path(folder))]
    packages = sorted(chance.sample(packages, min(settings.packages, len(packages))))
    # Held-out packages come first: a text counts only once, so copies of held-out files are not trained on.
    packages.sort(key=lambda path: SPLITS[::-1].index(split_of(path.stem)))

    files: dict[str, list[SourceFile]] = {split: [] for split in SPLITS}
    seen: set[str] = set()
    for package in packages:
        for path in sample_files(package, settings, chance):
            if (text := _read(path)) is None or text in seen or not is_written(text):
                continue
            seen.add(text)
            relative = str(path.relative_to(package.parent))
            files[split_of(package.stem)].append(SourceFile(package.stem, relative, text))

    files["train"] = without_copies(files["train"], files["validation"] + files["test"])
    return files


def without_copies(files: list[SourceFile], held_out: list[SourceFile]) -> list[SourceFile]:
    """The files that are not copies of held-out files. Forks of a package contain such copies, often altered."""
    held_out_lines = set().union(*(_distinctive_lines(file.text) for file in held_out))
    lines = (_distinctive_lines(file.text) for file in files)
    return [file for file, own in zip(files, lines, strict=True) if len(own & held_out_lines) <= COPIED * len(own)]


def _distinctive_lines(text: str) -> set[str]:
    return {line for line in map(str.strip, text.split("\n")) if len(line) >= DISTINCTIVE_LINE}


def _packages(folder: Path) -> list[Path]:
    """Modules and package folders directly in a folder."""
    skipped = COPIES | TESTS | {"site-packages", "dist-packages"}
    inside = [path for path in folder.glob("*") if path.name not in skipped and not path.name.startswith((".", "_"))]
    return [path for path in inside if path.suffix == ".py" or (path.name.isidentifier() and path.is_dir())]


def sample_files(package: Path, settings: CodeSettings, chance: random.Random) -> list[Path]:
    """Random source files of a package, without tests and copies of other packages."""
    if package.is_file():
        return [package]
    skipped = COPIES | TESTS
    files = [file for file in package.rglob("*.py") if skipped.isdisjoint(file.relative_to(package).parts)]
    return chance.sample(sorted(files), min(len(files), settings.files_per_package))


def _read(path: Path) -> str | None:
    """The text of a source file, or None if it is unreadable or not of an allowed size."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return text.replace("\r\n", "\n") if FILE_BYTES[0] <= len(text) <= FILE_BYTES[1] else None


def is_written(text: str) -> bool:
    """Whether a file is likely handwritten code: no very long lines, enough letters, no generator's notice."""
    if "DO NOT EDIT" in text[:1000] or max(map(len, text.split("\n"))) > LONGEST_LINE:
        return False
    visible = "".join(text.split())
    return sum(map(str.isalpha, visible)) >= LEAST_LETTERS * len(visible)
