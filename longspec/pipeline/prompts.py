"""Prompts for training, validation and test, of given lengths in tokens and in LongBench's wording."""

import json
import math
import random
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import yaml
from tqdm import tqdm

from longspec.longbench.tasks import TASKS
from longspec.pipeline.files import answers_file, claim, prompts_file, read_jsonl
from longspec.pipeline.settings import OWN, Settings
from longspec.pipeline.sources import SPLITS, Meeting, SourceFile, Texts, read_code, read_own, read_texts
from longspec.pipeline.target import LONGEST_TOKEN, TargetText
from longspec.replacing import write_atomically

T = TypeVar("T")
Record = dict[str, Any]
Turn = dict[str, str]
Make = Callable[[Any, int, random.Random], Record | None]
"""Maps (document, length in tokens, random generator) to a prompt, or to None if the document is too short."""

QUESTIONS: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("questions.yaml").read_text())
"""Questions of the task everyday, and requests that follow files in a prompt: about code, and about documents."""
SHORTEST = 0.85
"""Minimum length of a prompt as a fraction of the requested length."""
MARGIN = 8
"""Tokens of a prompt left unused, because joined texts may have more tokens than their parts."""
LEAST_CHARACTERS = 3
"""Lower bound on the average number of characters per token of code."""
CANDIDATES = 300
"""Maximum number of documents tried as worked questions or earlier turns of a prompt."""
EDIT = "Add the comment `# reviewed` as the first line of this file, and return the whole file.\n\n```python\n{text}```"
QUOTE = "{text}\n\nRepeat the text above word for word."
"""Prompts whose answers copy a part of the prompt."""
TRIES = 200
"""Maximum number of documents tried per prompt. Most are rejected by their length alone."""


def write_prompts(settings: Settings, root: Path) -> None:
    """Write the prompts of all missing groups. Raises UserError if existing ones were made with other settings."""
    common = {"target": settings.target, "with_text": settings.benchmarks is not None, "seed": settings.seed}
    common |= {"code": asdict(settings.code), "with_documents": settings.documents is not None}
    common |= {"text": settings.text} if settings.text else {}
    missing: dict[str, dict[str, list[int]]] = {}
    for split in SPLITS:
        lengths_by_group = {group: lengths for group, lengths in planned_lengths(settings, split).items() if lengths}
        facts = {
            group: {"prompts": len(lengths), "shortest": min(lengths), "longest": max(lengths)}
            for group, lengths in lengths_by_group.items()
        }
        claim(root / "prompts" / split / "settings.json", common | facts)
        missing[split] = {
            group: lengths
            for group, lengths in lengths_by_group.items()
            if not prompts_file(root, split, group).exists()
        }
    if not any(missing.values()):
        return

    target = TargetText.load(settings.target)
    code = read_code(settings.code, settings.seed)
    own = read_own(settings, target)
    for split, lengths_by_group in missing.items():
        texts = read_texts(settings.benchmarks, settings.documents, split)
        texts.own = own[split]
        file = answers_file(root, "chat", split)
        records = read_jsonl(file) if file.exists() else []
        chats = [record["messages"] for record in records if record["finished"]]
        makers = Makers(target, texts, code[split], chats, split)
        with ThreadPoolExecutor() as pool:  # tokenization releases the GIL
            tasks = [
                pool.submit(write_group, makers, group, lengths, settings.seed, prompts_file(root, split, group))
                for group, lengths in lengths_by_group.items()
            ]
        for task in tasks:
            task.result()


def write_group(makers: "Makers", group: str, lengths: list[int], seed: int, file: Path) -> None:
    """Write the prompts of one group."""
    records = list(makers.records(group, lengths, random.Random(f"{seed}/{makers.split}/{group}")))
    write_atomically(file, "".join(json.dumps(record) + "\n" for record in records), make_folder=True)
    skipped = f", {len(lengths) - len(records)} skipped" if len(records) < len(lengths) else ""
    tqdm.write(f"prompts, {makers.split}, {group}: {len(records)}{skipped}")


def planned_lengths(settings: Settings, split: str) -> dict[str, list[int]]:
    """Length of every prompt in tokens, by group; 0 is the bare question."""
    if split == "test":
        count = settings.prompts.test
        return {
            name: [context for context in task.contexts for _ in range(task.prompts or count)]
            for name, task in settings.evaluation.tasks.items()
        }
    chance = random.Random(f"{settings.seed}/{split}/lengths")
    lengths: dict[str, list[int]] = {}
    for group, count in getattr(settings.prompts, split).items():
        shortest, longest = length_range(settings, group)
        logs = math.log(max(1, shortest)), math.log(max(1, longest))
        # Evenly spread logarithms, because long prompts take most of the time.
        lengths[group] = [round(math.exp(chance.uniform(*logs))) if longest else 0 for _ in range(count)]
    return lengths


def length_range(settings: Settings, group: str) -> list[int]:
    """Length of a group's shortest and longest prompt in tokens; 0 for bare questions."""
    if group in ("gsm8k", "chat", OWN):
        return [0, 0]
    return settings.prompts.short_contexts if group.endswith("-short") else settings.prompts.contexts


class Makers:
    """Makes prompts from the documents of one split."""

    def __init__(
        self, target: TargetText, texts: Texts, code: list[SourceFile], chats: list[list[Turn]], split: str
    ) -> None:
        self.target, self.texts, self.code, self.chats, self.split = target, texts, code, chats, split
        self.packages: dict[str, list[SourceFile]] = {}
        for file in [*code, *texts.documents]:
            self.packages.setdefault(file.package, []).append(file)

    def records(self, group: str, lengths: list[int], chance: random.Random) -> Iterator[Record]:
        """Prompts of at most these lengths in tokens (0: the bare question). A document recurs after all were used."""
        task = group.removesuffix("-long").removesuffix("-short")
        documents, make = self._documents(task)
        order: list[Any] = []
        bar = tqdm(lengths, desc=f"{self.split} {group}", disable=None, leave=False)
        for number, length in enumerate(bar):
            for _ in range(min(TRIES, len(documents))):
                order = order or chance.sample(documents, len(documents))
                record = make(order.pop(), length, chance)
                if record is not None:
                    yield {"id": f"{group}-{self.split}-{number}", "task": task, "length": length, **record}
                    break

    def _documents(self, task: str) -> tuple[list[Any], Make]:
        """The documents of a task, and the function that makes a prompt from one of them."""
        texts = self.texts
        by_task: dict[str, tuple[list[Any], Make]] = {
            "lcc": (self.code, self.line),
            "repobench-p": (self.code, self.repository),
            "code-question": (self.code, partial(self.about_files, QUESTIONS["code"])),
            "document": (texts.documents, partial(self.about_files, QUESTIONS["document"])),
            "edit": (self.code, lambda file, tokens, _: self._copied(EDIT, file.text, tokens)),
            "quote": (texts.meetings, lambda meeting, tokens, _: self._copied(QUOTE, meeting.transcript, tokens)),
            "qmsum": (texts.meetings, self.meeting),
            "gsm8k": (texts.questions, self.question),
            "chat": (self.chats, self.conversation),
            OWN: (texts.own, lambda record, *_: record),
            "everyday": (QUESTIONS["everyday"], lambda question, *_: _user(question)),
            "aime24": (texts.problems, lambda problem, *_: _user(TASKS["aime24"].prompt.format(problem=problem))),
        }
        return by_task[task]

    def line(self, file: SourceFile, tokens: int, chance: random.Random) -> Record | None:
        """Code completion in one file: the text before one of its lines."""
        room = tokens - MARGIN - self.target.count(TASKS["lcc"].prompt.format(context=""))
        code = self._before_line(file, room, chance)
        return None if code is None else {"prefix": TASKS["lcc"].prompt.format(context=code)}

    def repository(self, file: SourceFile, tokens: int, chance: random.Random) -> Record | None:
        """Code completion in a repository: other files of the package, then the text before a line of `file`."""
        prompt = TASKS["repobench-p"].prompt
        heading = f"# Path: {file.path}\n"
        room = tokens - MARGIN - self.target.count(prompt.format(context="", input=heading))
        code = self._before_line(file, int(chance.uniform(0.3, 0.6) * room), chance)
        if code is None:
            return None
        context = self._other_files(file, room - self.target.count(code), tokens, chance)
        return None if context is None else {"prefix": prompt.format(context=context, input=heading + code)}

    def _other_files(self, file: SourceFile, room: int, tokens: int, chance: random.Random) -> str | None:
        """Other files of a package that fill `room` tokens up to a rest of (1 - SHORTEST) * `tokens`, or None."""
        others = [other for other in self.packages[file.package] if other is not file]
        if room > LONGEST_TOKEN * sum(len(other.text) for other in others):
            return None
        context = []
        for other in chance.sample(others, len(others)):
            piece, used = self.target.head(f"# Path: {other.path}\n{other.text}\n", room)
            context.append(piece)
            room -= used
            if room < (1 - SHORTEST) * tokens:
                break
        return "".join(context) if room < (1 - SHORTEST) * tokens else None

    def about_files(
        self, questions: Sequence[str], file: SourceFile, tokens: int, chance: random.Random
    ) -> Record | None:
        """Files of a package or a collection, the given one last, and a request about them."""
        question = f"\n\n{chance.choice(questions)}"
        room = tokens - MARGIN - self.target.count(question) - self.target.chat_overhead
        last, used = self.target.head(f"# Path: {file.path}\n{file.text}\n", room)
        room -= used
        before: str | None = ""
        if room >= (1 - SHORTEST) * tokens:
            before = self._other_files(file, room, tokens, chance)
        return None if before is None else _user(before + last + question)

    def _copied(self, prompt: str, text: str, tokens: int) -> Record | None:
        """A prompt with as many lines of a text as fit into `tokens` tokens; None if the text is too short."""
        room = tokens - MARGIN - self.target.count(prompt.format(text="")) - self.target.chat_overhead
        part, used = self.target.head(text, room)
        return _user(prompt.format(text=part)) if used >= SHORTEST * room > 0 else None

    def _before_line(self, file: SourceFile, tokens: int, chance: random.Random) -> str | None:
        """At most `tokens` tokens of whole lines up to a random line of the file; None if the file is too short."""
        least = LEAST_CHARACTERS * tokens
        if tokens < 1 or least >= len(file.text):
            return None
        end = file.text.rfind("\n", 0, chance.randint(least, len(file.text))) + 1
        code, used = self.target.tail(file.text[:end], tokens)
        return code if used >= SHORTEST * tokens else None

    def meeting(self, meeting: Meeting, tokens: int, chance: random.Random) -> Record | None:
        """A part of a meeting's transcript and one of the queries about the meeting."""
        prompt = TASKS["qmsum"].prompt
        transcript = meeting.transcript
        query = chance.choice(meeting.queries)
        fixed = self.target.count(prompt.format(context="", input=query)) + self.target.chat_overhead
        room = tokens - MARGIN - fixed
        # Start early enough that, at five characters per token, the rest of the transcript fills the room.
        start = chance.randrange(max(1, len(transcript) - 5 * max(0, room)))
        start = transcript.find("\n", start) + 1 if start else 0
        part, used = self.target.head(transcript[start:], room)
        # A long prompt starts with other meetings.
        others = [other for other in self.texts.meetings if other is not meeting]
        for other in chance.sample(others, len(others)):
            if used >= SHORTEST * room:
                break
            earlier, more = self.target.head(other.transcript, room - used)
            part, used = f"{earlier}\n{part}", used + more
        return _user(prompt.format(context=part, input=query)) if used >= SHORTEST * room > 0 else None

    def question(self, question: tuple[str, str], tokens: int, chance: random.Random) -> Record | None:
        """A question, preceded by worked questions that fill `tokens` tokens."""
        if not tokens:
            return _user(question[0])
        asked = f"Question: {question[0]}\nAnswer:"
        room = tokens - MARGIN - self.target.count(asked) - self.target.chat_overhead
        shown = self._fill(self.texts.questions, question, _worked, room, tokens, chance)
        return None if shown is None else _user("".join(map(_worked, shown)) + asked)

    def conversation(self, turns: list[Turn], tokens: int, chance: random.Random) -> Record | None:
        """A user turn, preceded by other conversations as earlier turns that fill `tokens` tokens."""
        asked = turns[:-1]
        if not tokens:
            return {"messages": asked}
        room = tokens - MARGIN - len(self.target.prompt_ids({"messages": asked}))
        extra = self.target.exchange_overhead
        earlier = self._fill(self.chats, turns, _contents, room, tokens, chance, extra)
        return None if earlier is None else {"messages": [*chain(*earlier), *asked]}

    def _fill(
        self,
        documents: list[T],
        asked: T,
        text: Callable[[T], str],
        room: int,
        tokens: int,
        chance: random.Random,
        extra: int = 0,
    ) -> list[T] | None:
        """Random documents other than `asked` that fill `room` tokens up to a rest of (1 - SHORTEST) * `tokens`.

        Returns None if the documents do not suffice. text: maps a document to its text. extra: additional tokens per
        document.
        """
        chosen: list[T] = []
        for document in chance.sample(documents, min(CANDIDATES, len(documents))):
            if room < (1 - SHORTEST) * tokens:
                break
            shown = text(document)
            if document is asked or len(shown) > LONGEST_TOKEN * room:
                continue
            size = self.target.count(shown) + extra
            if size <= room:
                chosen.append(document)
                room -= size
        return chosen if room < (1 - SHORTEST) * tokens else None


def _worked(question: tuple[str, str]) -> str:
    return f"Question: {question[0]}\nAnswer: {question[1]}\n\n"


def _contents(turns: list[Turn]) -> str:
    return "\n".join(turn["content"] for turn in turns)


def _user(content: str) -> Record:
    return {"messages": [{"role": "user", "content": content}]}
