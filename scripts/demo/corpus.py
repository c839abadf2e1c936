"""The corpus: the Python standard library's sources, split by package, as the JSONL files that each step reads."""

import json
import random
import sysconfig
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from longspec.inference.tasks import TASKS

HELD_OUT = ("concurrent", "dbm", "http", "json", "tomllib", "wsgiref", "xmlrpc", "zoneinfo")
"""Packages that no training file comes from. Each has several files, so that it can be asked about as a repository."""
LEFT_OUT = {
    *("site-packages", "dist-packages", "lib-dynload", "__pycache__"),  # not the library's own sources
    *("test", "tests", "idle_test"),  # many installations come without them
    *("encodings", "pydoc_data"),  # tables and prose
}
SHORTEST_FILE = 400
LONG_DOCUMENT = 8000
TASK = "repobench-p"
TEXTS, LONG_TEXTS, ANSWERS = "texts.jsonl", "long_texts.jsonl", "answers.jsonl"
HELD_OUT_TEXTS, PROMPTS = "held_out.jsonl", f"{TASK}.jsonl"


@dataclass(frozen=True)
class SourceFile:
    """One file of the library: its path below the library's folder, and its text under a line with that path."""

    path: str
    text: str

    @property
    def package(self) -> str:
        """The top-level package or module, by which files are split."""
        return Path(self.path).parts[0].removesuffix(".py")


@dataclass(frozen=True)
class CorpusSettings:
    """Sizes in characters; a token has three to four."""

    context: int = 900
    """Of another file of the package, in a completion prompt."""
    code: int = 1500
    """Of the file to be completed."""
    answer: int = 2400
    answers: int = 900
    """Completion records to train on."""
    prompts: int = 12
    """Held-out completion prompts, spread over the packages."""
    largest: int = 0
    """Characters of training text at most; 0 for all there is."""
    seed: int = 0

    def fits(self, file: SourceFile) -> bool:
        """Whether a file is long enough to be cut."""
        return len(file.text) > self.code + 2 * self.answer


def write_corpus(folder: Path, settings: CorpusSettings) -> None:
    """All of the corpus's JSONL files."""
    train, held_out = split(library_files())
    chance = random.Random(settings.seed)
    chance.shuffle(train)
    if settings.largest:
        train = up_to(train, settings.largest)
    write_jsonl(folder / TEXTS, ({"text": file.text} for file in train))
    write_jsonl(folder / LONG_TEXTS, ({"text": file.text} for file in train if len(file.text) > LONG_DOCUMENT))
    write_jsonl(folder / ANSWERS, answer_records(train, settings, chance))
    write_jsonl(folder / HELD_OUT_TEXTS, ({"path": file.path, "text": file.text} for file in held_out))
    write_jsonl(folder / PROMPTS, prompt_records(held_out, settings, chance))


def library_files() -> list[SourceFile]:
    """The running Python's standard library, in order of path."""
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        below = path.relative_to(root)
        if LEFT_OUT.intersection(below.parts) or below.parts[0].startswith(("_sysconfigdata", "config-")):
            continue
        text = path.read_text(encoding="utf-8", errors="ignore")
        if len(text) >= SHORTEST_FILE:
            files.append(SourceFile(below.as_posix(), f"# Path: {below.as_posix()}\n{text}"))
    return files


def split(files: Iterable[SourceFile]) -> tuple[list[SourceFile], list[SourceFile]]:
    """(training files, held-out files): no package is on both sides."""
    train: list[SourceFile] = []
    held_out: list[SourceFile] = []
    for file in files:
        (held_out if file.package in HELD_OUT else train).append(file)
    return train, held_out


def answer_records(files: list[SourceFile], settings: CorpusSettings, chance: random.Random) -> Iterator[dict]:
    """Completion prompts with the code that follows, {source, target}: what the held-out prompts ask for."""
    packages = by_package(files)
    long_enough = [file for file in files if settings.fits(file)]
    weights = [len(file.text) for file in long_enough]
    for file in chance.choices(long_enough, weights, k=settings.answers):
        cut = completion(file, packages[file.package], settings, chance)
        yield {"source": TASKS[TASK].prompt.format(**cut), "target": cut["following"]}


def prompt_records(files: list[SourceFile], settings: CorpusSettings, chance: random.Random) -> Iterator[dict]:
    """Completion prompts in LongBench's form, from each package in turn; the answer is the next line."""
    packages = by_package(files)
    askable = [members for members in packages.values() if any(map(settings.fits, members))]
    for number in range(settings.prompts):
        members = askable[number % len(askable)]
        file = chance.choice([member for member in members if settings.fits(member)])
        cut = completion(file, members, settings, chance)
        yield {
            "input": cut["input"],
            "context": cut["context"],
            "answers": [cut["following"].splitlines()[0]],
            "length": len(f"{cut['context']}{cut['input']}".split()),
            "dataset": TASK,
            "language": "python",
            "all_classes": None,
            "_id": f"{file.path}:{number}",
        }


def by_package(files: Iterable[SourceFile]) -> dict[str, list[SourceFile]]:
    packages: dict[str, list[SourceFile]] = defaultdict(list)
    for file in files:
        packages[file.package].append(file)
    return packages


def completion(
    file: SourceFile, members: list[SourceFile], settings: CorpusSettings, chance: random.Random
) -> dict[str, str]:
    """`file` cut at a random line: `input` before the cut, `following` after it.

    `context` is the beginning of another of the package's `members`, empty if there is none.
    """
    others = [member for member in members if member.path != file.path]
    context = whole_lines(chance.choice(others).text[: settings.context]) + "\n\n" if others else ""
    first_cut, last_cut = settings.code, len(file.text) - settings.answer
    cut = file.text.index("\n", chance.randint(first_cut, last_cut)) + 1
    cut += len(file.text[cut:]) - len(file.text[cut:].lstrip("\n"))  # the next line is not a blank one
    before = file.text[:cut]
    if len(before) > settings.code:
        before = f"# Path: {file.path}\n" + before[before.index("\n", len(before) - settings.code) + 1 :]
    return {"context": context, "input": before, "following": file.text[cut : cut + settings.answer]}


def whole_lines(text: str) -> str:
    """`text` without a last line that was cut off."""
    return text[: text.rfind("\n") + 1]


def up_to(files: list[SourceFile], characters: int) -> list[SourceFile]:
    """The first files, with no more than so many characters in all, but one at least."""
    kept: list[SourceFile] = []
    size = 0
    for file in files:
        size += len(file.text)
        if kept and size > characters:
            break
        kept.append(file)
    return kept


def write_jsonl(path: Path, records: Iterable[dict]) -> None:
    with path.open("w", encoding="utf-8") as handle:
        for record in records:
            handle.write(json.dumps(record, ensure_ascii=False) + "\n")


def read_jsonl(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
