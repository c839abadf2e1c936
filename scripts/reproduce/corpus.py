"""The corpus step: what target and draft are trained on, what is held out, and the tokenizer."""

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerFast

from longspec.errors import UserError
from scripts.pipeline.files import ANSWERS, HELD_OUT_TEXTS, LONG_TEXTS, TEXTS, read_jsonl, write_jsonl
from scripts.pipeline.sources import SourceFile, by_package, library_files, up_to
from scripts.pipeline.tokenizer import make_tokenizer
from scripts.reproduce.code_files import HoldOut, installed_files, split
from scripts.reproduce.tasks import makers, training_records, worked, write_tasks
from scripts.reproduce.text_files import Meeting, Solution, Texts, read_texts

DRAFT_TEXTS = "draft_texts.jsonl"
"""What stage 1 reads: code that the target has not read (what it has, it partly knows by heart, and no draft can), and
meetings and worked solutions, which are too few to have others for."""
DRAFT_ANSWERS = "draft_answers.jsonl"
"""What stage 3 reads: prompts with answers, of the same code, meetings and solutions."""
HELD_OUT_LONG = "held_out_long.jsonl"
"""What stage 2 is scored on while it trains."""
HELD_OUT_DOCUMENTS = 2
DRAFTS_SHARE = 1 / 2
"""Of the code, at most."""
TOKENIZER = "tokenizer"
SOLUTIONS_A_TEXT = 40


@dataclass(frozen=True)
class CorpusSettings:
    family: str
    text: str | None
    """The folder of meetings and worked solutions."""
    vocab_size: int
    positions: int
    contexts: tuple[int, ...]
    """Tokens of the prompts, shortest first."""
    answer_tokens: int
    """Of code that follows a prompt, in training."""
    answers: int
    """Training prompts of each task and context, for the target."""
    draft_answers: int
    """The same, for drafts."""
    hold_out: HoldOut
    installed: bool
    """Whether the code is that of the installed packages, too, and not the standard library's alone."""
    largest: int
    """Characters of code at most."""
    text_repeats: int
    """How often meetings and worked solutions are in the texts: they are few beside the code."""
    tokenizer_characters: int
    draft_characters: int
    """Of the code, for drafts alone; meetings and worked solutions come on top of it."""
    long_characters: int
    """Of long documents made of it, for stage 2."""
    seed: int = 0

    @property
    def window(self) -> int:
        """Tokens of the longest prompt with its answer."""
        return self.contexts[-1] + self.answer_tokens


@dataclass(frozen=True)
class TaskSettings:
    prompts_per_cell: int
    seed: int = 1


def write_corpus(folder: Path, settings: CorpusSettings) -> None:
    """All of the corpus's files, and the tokenizer beside them. Raises UserError for bad or too few texts."""
    chance = random.Random(settings.seed)
    texts, _ = read_texts(Path(settings.text) if settings.text else None)
    train, held_out = split(installed_files() if settings.installed else library_files(), settings.hold_out)
    if not held_out:
        raise UserError("corpus: none of the held-out packages is installed here; nothing could be evaluated")
    train, drafts = apart(some(train, settings.largest, chance), settings.draft_characters, chance)
    prose = [text for _ in range(settings.text_repeats) for text in documents(texts, chance)]
    read = [file.text for file in train] + prose
    write_jsonl(folder / TEXTS, ({"text": text} for text in read))
    own = [file.text for file in drafts] + documents(texts, chance)
    write_jsonl(folder / DRAFT_TEXTS, ({"text": text} for text in chance.sample(own, len(own))))
    long = long_documents(drafts, texts, 6 * settings.window, chance)
    chance.shuffle(long)
    write_jsonl(folder / LONG_TEXTS, ({"text": text} for text in first(long, settings.long_characters)))
    unseen = long_documents(held_out, Texts(), 6 * settings.window, chance)
    few = chance.sample(unseen, min(HELD_OUT_DOCUMENTS, len(unseen)))
    write_jsonl(folder / HELD_OUT_LONG, ({"text": text} for text in few))
    write_jsonl(folder / HELD_OUT_TEXTS, ({"path": file.path, "text": file.text} for file in held_out))
    sample = first(chance.sample(read, len(read)), settings.tokenizer_characters)
    tokenizer = make_tokenizer(sample, settings.family, settings.vocab_size, settings.positions)
    tokenizer.save_pretrained(folder / TOKENIZER)
    for name, files, count in ((ANSWERS, train, settings.answers), (DRAFT_ANSWERS, drafts, settings.draft_answers)):
        found = makers(files, texts, tokenizer, settings.answer_tokens)
        write_jsonl(folder / name, training_records(found, settings.contexts, count, settings.seed))


def write_held_out_tasks(folder: Path, corpus: Path, settings: CorpusSettings, tasks: TaskSettings) -> None:
    """The prompts of the evaluation, one file for each task and context."""
    files = [SourceFile(**document) for document in read_jsonl(corpus / HELD_OUT_TEXTS)]
    texts = read_texts(Path(settings.text) if settings.text else None)[1]
    found = makers(files, texts, PreTrainedTokenizerFast.from_pretrained(corpus / TOKENIZER), settings.answer_tokens)
    print(f"tasks: {', '.join(maker.task for maker in found)}", flush=True)
    if len(found) == 2:
        print("code alone: meetings and worked solutions come from --text DIR", flush=True)
    write_tasks(folder, found, settings.contexts, tasks.prompts_per_cell, tasks.seed)


def some(files: Sequence[SourceFile], characters: int, chance: random.Random) -> list[SourceFile]:
    """At most so many characters of files, package after package in random order."""
    packages = by_package(files)
    return up_to((file for name in chance.sample(list(packages), len(packages)) for file in packages[name]), characters)


def apart(
    files: Sequence[SourceFile], characters: int, chance: random.Random
) -> tuple[list[SourceFile], list[SourceFile]]:
    """Files for the target, and random ones, of so many characters and DRAFTS_SHARE at most, for drafts alone."""
    most = min(characters, int(DRAFTS_SHARE * sum(len(file.text) for file in files)))
    chosen = {file.path for file in up_to(chance.sample(files, len(files)), most)}
    return [file for file in files if file.path not in chosen], [file for file in files if file.path in chosen]


def first(texts: Iterable[str], characters: int) -> Iterator[str]:
    """The first texts, one at least, until there are so many characters."""
    size = 0
    for text in texts:
        yield text
        size += len(text)
        if size >= characters:
            return


def documents(texts: Texts, chance: random.Random) -> list[str]:
    """Meetings with all their queries, and worked solutions, many to a text, in random order."""
    shuffled = chance.sample(texts.solutions, len(texts.solutions))
    groups = [shuffled[i : i + SOLUTIONS_A_TEXT] for i in range(0, len(shuffled), SOLUTIONS_A_TEXT)]
    found = [told(meeting) for meeting in texts.meetings] + [shown(group) for group in groups]
    return chance.sample(found, len(found))


def told(meeting: Meeting) -> str:
    answers = "".join(f"\nQuery: {query}\nAnswer: {answer}\n" for query, answer in meeting.queries)
    return f"Transcript:\n{meeting.transcript.rstrip()}\n{answers}"


def shown(solutions: Iterable[Solution]) -> str:
    return "".join(map(worked, solutions)).rstrip() + "\n"


def long_documents(files: Iterable[SourceFile], texts: Texts, characters: int, chance: random.Random) -> list[str]:
    """Texts of so many characters or more: files of one package, meetings, or worked solutions, end to end."""
    sources = [[file.text for file in members] for members in by_package(files).values()]
    sources.append([told(meeting) for meeting in chance.sample(texts.meetings, len(texts.meetings))])
    sources.append([worked(solution) for solution in chance.sample(texts.solutions, len(texts.solutions))])
    found = []
    for source in sources:
        parts: list[str] = []
        for text in source:
            parts.append(text)
            if sum(map(len, parts)) >= characters:
                found.append("\n".join(parts))
                parts = []
    return found
