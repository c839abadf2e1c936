"""The four tasks: prompts of a wanted number of tokens, with what should follow, in LongBench's form.

The same functions make the held-out prompts and the records that target and draft are trained on; what differs are the
documents. Records: input, context, answers, length, dataset, language, all_classes, _id (arXiv 2308.14508).
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from longspec.longbench.tasks import TASKS, Task
from scripts.pipeline.files import write_jsonl
from scripts.pipeline.machine import threads
from scripts.pipeline.sources import SourceFile, by_package, heading, line_after, whole_lines
from scripts.reproduce.text_files import Meeting, Solution, Texts

TEMPLATES = {name: TASKS[name] for name in ("lcc", "repobench-p", "qmsum")} | {
    "gsm8k": Task("{context}Question: {input}\nAnswer:", ("context", "input"), 256)
}
"""Every task's prompt. Worked solutions are no task of LongBench's, so only the experiment knows them."""
SHORTEST = 0.85
"""A prompt's tokens as a share of those it may have."""
LONGEST_TOKEN = 6
"""Characters a token has on average at most, however plain the text."""
TRIES = 4
MOST_FILES = 64
"""Of a package, in a prompt."""


class Asked(NamedTuple):
    """One question: what fills the template, what comes next, and which document it was made of."""

    id: str
    context: str
    input: str
    following: str

    def prompt(self, task: str) -> str:
        return TEMPLATES[task].prompt.format(context=self.context, input=self.input)


@dataclass(frozen=True)
class Gauge:
    """Measures text in tokens."""

    tokenizer: Any

    def count(self, text: str) -> int:
        return len(self.tokenizer.backend_tokenizer.encode_batch_fast([text], add_special_tokens=False)[0])

    def head(self, text: str, tokens: int) -> str:
        """The first whole lines with at most so many tokens."""
        piece = text[: LONGEST_TOKEN * max(0, tokens)]
        ends = self._ends(piece)
        return piece if len(piece) == len(text) and len(ends) <= tokens else whole_lines(piece[: _at(ends, tokens)])

    def tail(self, text: str, tokens: int) -> str:
        """The last whole lines with at most so many tokens; `text` ends with a line's end."""
        piece = text[len(text) - min(len(text), LONGEST_TOKEN * max(0, tokens)) :]
        ends = self._ends(piece)
        if len(piece) == len(text) and len(ends) <= tokens:
            return piece
        start = _at(ends, max(1, len(ends) - tokens))
        return piece[piece.find("\n", max(0, start - 1)) + 1 :]

    def _ends(self, text: str) -> list[int]:
        """Where each token ends, in characters."""
        return [end for _, end in self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).offsets]


def _at(ends: list[int], tokens: int) -> int:
    return ends[min(tokens, len(ends)) - 1] if tokens > 0 and ends else 0


@dataclass(frozen=True)
class Maker:
    """One task on one side of the split. `ask(document, tokens, chance)` makes a prompt of about so many tokens."""

    task: str
    documents: Sequence[Any]
    weights: Sequence[float]
    """How often a document is asked about in training, relative to the others."""
    ask: Callable[[Any, int, random.Random], Asked | None]
    gauge: Gauge

    def fitting(self, document: Any, context: int, chance: random.Random) -> Asked | None:
        """A prompt of 85% to 100% of `context` tokens, or None if the document gives none."""
        shortest = int(SHORTEST * context) + 1
        for _ in range(TRIES):
            asked = self.ask(document, chance.randint((shortest + context) // 2, context), chance)
            if asked is None:
                return None
            if asked.following.strip() and shortest <= self.gauge.count(asked.prompt(self.task)) <= context:
                return asked
        return None


def makers(files: Sequence[SourceFile], texts: Texts, tokenizer: Any, answer_tokens: int) -> list[Maker]:
    """The tasks that these files and texts allow; `answer_tokens` is what follows a prompt of code at most."""
    gauge, packages = Gauge(tokenizer), by_package(files)
    sizes = [len(file.text) for file in files]
    repository = partial(ask_repository, gauge=gauge, packages=packages, answer_tokens=answer_tokens)
    found = [
        Maker("lcc", files, sizes, partial(ask_line, gauge=gauge, answer_tokens=answer_tokens), gauge),
        Maker("repobench-p", files, sizes, repository, gauge),
    ]
    if texts.meetings:
        lengths = [len(meeting.transcript) for meeting in texts.meetings]
        found.append(Maker("qmsum", texts.meetings, lengths, partial(ask_meeting, gauge=gauge), gauge))
    if texts.solutions:
        solution = partial(ask_solution, gauge=gauge, solutions=texts.solutions)
        found.append(Maker("gsm8k", texts.solutions, [1.0] * len(texts.solutions), solution, gauge))
    return found


def ask_line(file: SourceFile, tokens: int, chance: random.Random, gauge: Gauge, answer_tokens: int) -> Asked | None:
    """The file up to one of its lines, as much as there is room for."""
    room = tokens - gauge.count(TEMPLATES["lcc"].prompt.format(context=heading(file.path)))
    return cut(file, room, chance, gauge, answer_tokens)


def ask_repository(
    file: SourceFile,
    tokens: int,
    chance: random.Random,
    gauge: Gauge,
    packages: dict[str, list[SourceFile]],
    answer_tokens: int,
) -> Asked | None:
    """Other files of the package, then a file up to one of its lines."""
    empty = TEMPLATES["repobench-p"].prompt.format(context="", input=heading(file.path))
    room = tokens - gauge.count(empty)
    part = cut(file, int(chance.uniform(0.3, 0.6) * room), chance, gauge, answer_tokens)
    if part is None:
        return None
    left, context = room - gauge.count(part.context), ""
    others = [member for member in packages[file.package] if member.path != file.path]
    for other in chance.sample(others, min(MOST_FILES, len(others))):
        beginning = gauge.head(other.text, left - 1)
        if not beginning:
            break
        beginning = beginning.rstrip("\n") + "\n\n"
        context, left = context + beginning, left - gauge.count(beginning)
    return Asked(file.path, context, part.context, part.following)


def cut(file: SourceFile, room: int, chance: random.Random, gauge: Gauge, answer_tokens: int) -> Asked | None:
    """The file's lines before a random one, at most `room` tokens under the file's heading; None if it is too short."""
    body = file.text.split("\n", 1)[1]
    first, last = 3 * room, len(body) - 1 - 4 * min(answer_tokens, room)
    if room < 1 or first >= last or "\n" not in body[last:]:
        return None
    place = line_after(body, chance.randint(first, last))
    following = gauge.head(body[place:], answer_tokens)
    return Asked(file.path, heading(file.path) + gauge.tail(body[:place], room), "", following)


def ask_meeting(meeting: Meeting, tokens: int, chance: random.Random, gauge: Gauge) -> Asked | None:
    """A query about the transcript, or about as much of it, from one of its lines on, as there is room for."""
    query, answer = chance.choice(meeting.queries)
    room = tokens - gauge.count(TEMPLATES["qmsum"].prompt.format(context="", input=query))
    spare = len(meeting.transcript) - 5 * room
    start = meeting.transcript.find("\n", chance.randint(0, spare)) + 1 if spare > 0 else 0
    return Asked(meeting.id, gauge.head(meeting.transcript[start:], room), query, " " + answer)


def ask_solution(
    solution: Solution, tokens: int, chance: random.Random, gauge: Gauge, solutions: Sequence[Solution]
) -> Asked | None:
    """A question under others that are answered."""
    empty = TEMPLATES["gsm8k"].prompt.format(context="", input=solution.question)
    left, context = tokens - gauge.count(empty), ""
    misfits = 0
    while misfits < TRIES:
        shown = chance.choice(solutions)
        text = worked(shown)
        size = gauge.count(text)
        if size <= left and shown.question != solution.question:
            context, left = context + text, left - size
        else:
            misfits += 1
    return Asked(solution.id, context, solution.question, " " + solution.answer)


def worked(solution: Solution) -> str:
    """A question with its answer, as prompts and training texts show them."""
    return f"Question: {solution.question}\nAnswer: {solution.answer}\n\n"


def write_tasks(folder: Path, found: Sequence[Maker], contexts: Sequence[int], count: int, seed: int) -> None:
    """`folder`/<task>-<context>.jsonl with `count` prompts about different documents, or as many as there are."""
    for maker in found:
        for context in contexts:
            chance = random.Random(f"{seed} {maker.task} {context}")
            asked: list[Asked] = []
            for document in chance.sample(maker.documents, len(maker.documents)):
                if len(asked) < count and (one := maker.fitting(document, context, chance)):
                    asked.append(one)
            if len(asked) < count:
                print(f"{maker.task} at {context} tokens: {len(asked)} prompts, not {count}; no more documents fit")
            if asked:
                write_jsonl(folder / f"{maker.task}-{context}.jsonl", (record(maker.task, one) for one in asked))


def record(task: str, asked: Asked) -> dict[str, Any]:
    """The question in LongBench's form; of code the answer is the next line."""
    is_code = task in ("lcc", "repobench-p")
    return {
        "input": asked.input,
        "context": asked.context,
        "answers": [asked.following.splitlines()[0] if is_code else asked.following.strip()],
        "length": len(f"{asked.context}{asked.input}".split()),
        "dataset": task,
        "language": "python" if is_code else "en",
        "all_classes": None,
        "_id": asked.id,
    }


def training_records(found: Sequence[Maker], contexts: Sequence[int], count: int, seed: int) -> list[dict[str, str]]:
    """{source, target}: `count` prompts of each task and context with what follows, in random order."""
    cells = [(maker, context) for maker in range(len(found)) for context in contexts for _ in range(count)]
    jobs = [(*cell, f"{seed} {number}") for number, cell in enumerate(cells)]
    random.Random(seed).shuffle(jobs)
    return list(_answered(found, jobs))


def _answered(found: Sequence[Maker], jobs: list[tuple[int, int, str]]) -> Iterator[dict[str, str]]:
    # Forked, so that nothing is copied: the makers hold all documents.
    with get_context("fork").Pool(threads(), _share, (found,)) as pool:
        for asked in tqdm(pool.imap(_ask, jobs, chunksize=8), total=len(jobs), desc="answers", disable=None):
            if asked is not None:
                yield asked


_shared: Sequence[Maker] = ()


def _share(found: Sequence[Maker]) -> None:
    global _shared
    _shared = found


def _ask(job: tuple[int, int, str]) -> dict[str, str] | None:
    number, context, seed = job
    maker, chance = _shared[number], random.Random(seed)
    for document in chance.choices(maker.documents, maker.weights, k=4 * TRIES):
        if asked := maker.fitting(document, context, chance):
            return {"source": asked.prompt(maker.task), "target": asked.following}
    return None
