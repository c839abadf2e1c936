"""The corpus: the Python standard library's sources, split by package, as the JSONL files that each step reads."""

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from longspec.longbench.tasks import TASKS
from scripts.pipeline.files import ANSWERS, HELD_OUT_TEXTS, LONG_TEXTS, TEXTS, write_jsonl
from scripts.pipeline.sources import (
    HELD_OUT,
    SourceFile,
    by_package,
    heading,
    library_files,
    line_after,
    up_to,
    whole_lines,
)

LONG_DOCUMENT = 8000
TASK = "repobench-p"
PROMPTS = f"{TASK}.jsonl"


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


def completion(
    file: SourceFile, members: list[SourceFile], settings: CorpusSettings, chance: random.Random
) -> dict[str, str]:
    """`file` cut at a random line: `input` before the cut, `following` after it.

    `context` is the beginning of another of the package's `members`, empty if there is none.
    """
    others = [member for member in members if member.path != file.path]
    context = whole_lines(chance.choice(others).text[: settings.context]) + "\n\n" if others else ""
    first_cut, last_cut = settings.code, len(file.text) - settings.answer
    cut = line_after(file.text, chance.randint(first_cut, last_cut))
    before = file.text[:cut]
    if len(before) > settings.code:
        before = heading(file.path) + before[before.index("\n", len(before) - settings.code) + 1 :]
    return {"context": context, "input": before, "following": file.text[cut : cut + settings.answer]}
