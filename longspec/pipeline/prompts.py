"""Prompts for training, validation and test, of given lengths in tokens and in LongBench's wording; source files."""

import json
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

import yaml
from tqdm import tqdm

from longspec.data.aligners import Turn
from longspec.longbench.tasks import TASKS
from longspec.pipeline.files import answers_file, claim, prompts_file, read_jsonl
from longspec.pipeline.settings import OWN, SOURCE, Settings
from longspec.pipeline.sources import Meeting, SourceFile, Texts, read_code, read_own, read_texts
from longspec.pipeline.target import LONGEST_TOKEN, TargetText
from longspec.regenerate.settings import SPLITS
from longspec.replacing import write_atomically

T = TypeVar("T")
Record = dict[str, Any]
Make = Callable[[Any, int, random.Random], Record | None]
"""Maps (document, length in tokens, random generator) to a prompt, or to None if the document is too short."""

QUESTIONS: dict[str, list[str]] = yaml.safe_load(Path(__file__).with_name("questions.yaml").read_text())
"""Questions of the task everyday, and requests that follow files in a prompt: about code, and about documents."""
SHORTEST = 0.85
"""Minimum length of a prompt as a fraction of the requested length."""
MARGIN = 8
"""Tokens of a prompt left unused, because joined texts may have more tokens than their parts."""
LEAST_CHARACTERS = 3
"""Lower bound on the average number of characters per token."""
CANDIDATES = 300
"""Maximum number of other documents in a prompt."""
EDIT = "Add the comment `# reviewed` as the first line of this file, and return the whole file.\n\n```python\n{text}```"
QUOTE = "{text}\n\nRepeat the text above word for word."
"""Prompts whose answers copy a part of the prompt."""
KEYS = {"document": "documents", "chat": "chat", OWN: "text"}
KEYS |= dict.fromkeys(("quote", "qmsum", "gsm8k", "aime24"), "benchmarks")
"""Key of the settings that a task has its text from, if it is not code."""
TRIES = 200
"""Maximum number of documents tried per prompt. Most are rejected by their length alone."""


def write_prompts(settings: Settings, root: Path) -> None:
    """Write all missing groups of prompts and source files. Raises UserError if existing ones had other settings."""
    limits = asdict(settings.code)
    source, count = answers_file(root, SOURCE, "train"), limits.pop("train_files")
    if count:
        claim(source.with_suffix(".settings.json"), {"train_files": count, "code": limits, "seed": settings.seed})
    common = {"target": settings.target, "with_text": settings.benchmarks is not None, "seed": settings.seed}
    common |= {"code": limits, "with_documents": settings.documents is not None}
    common |= {"text": settings.text} if settings.text else {}
    folders = {"benchmarks": settings.benchmarks, "documents": settings.documents}
    common |= {name: folder and str(Path(folder).absolute()) for name, folder in folders.items()}
    for split in SPLITS:
        facts = {
            group: {"prompts": len(lengths), "shortest": min(lengths), "longest": max(lengths)}
            for group, lengths in planned_lengths(settings, split).items()
        }
        claim(root / "prompts" / split / "settings.json", common | facts, added=list(folders))
    if prompts_are_written(settings, root):
        return

    target = TargetText.load(settings.target)
    code = read_code(settings.code, settings.seed)
    if count and not source.exists():
        write_source(code["train"], count, settings.seed, source)
    own = read_own(settings, target)
    for split in SPLITS:
        texts = read_texts(settings.benchmarks, settings.documents, split)
        texts.own, texts.code = own[split], code[split]
        chats = read_jsonl(answers_file(root, "chat", split))
        texts.chats = [record["messages"] for record in chats if record["finished"]]
        makers = Makers(target, texts, split)
        with ThreadPoolExecutor() as pool:  # tokenization releases the GIL
            tasks = [
                pool.submit(write_group, makers, group, lengths, settings.seed, prompts_file(root, split, group))
                for group, lengths in missing_groups(settings, root, split).items()
            ]
        for task in tasks:
            task.result()


def prompts_are_written(settings: Settings, root: Path) -> bool:
    """Whether all groups of prompts and the source files exist."""
    has_source = not settings.code.train_files or answers_file(root, SOURCE, "train").exists()
    return has_source and not any(missing_groups(settings, root, split) for split in SPLITS)


def missing_groups(settings: Settings, root: Path, split: str) -> dict[str, list[int]]:
    """Length of every prompt in the groups without a file, by group."""
    planned = planned_lengths(settings, split)
    return {group: lengths for group, lengths in planned.items() if not prompts_file(root, split, group).exists()}


def write_source(files: Sequence[SourceFile], count: int, seed: int, file: Path) -> None:
    """Write up to `count` random files as records of plain text."""
    chosen = random.Random(f"{seed}/{SOURCE}").sample(files, min(count, len(files)))
    lines = (json.dumps({"id": one.path, "text": one.text}) + "\n" for one in chosen)
    write_atomically(file, "".join(lines), make_folder=True)
    tqdm.write(f"source files to train on: {len(chosen)}")


def write_group(makers: "Makers", group: str, lengths: list[int], seed: int, file: Path) -> None:
    records = list(makers.records(group, lengths, random.Random(f"{seed}/{makers.split}/{group}")))
    write_atomically(file, "".join(json.dumps(record) + "\n" for record in records), make_folder=True)
    line = f"prompts, {makers.split}, {group}: {len(records)}"
    if skipped := len(lengths) - len(records):
        line += f", {skipped} skipped ({makers.reason(group)})"
    tqdm.write(line)


def planned_lengths(settings: Settings, split: str) -> dict[str, list[int]]:
    """Length of every prompt in tokens, by group with prompts; 0 is the bare question."""
    if split == "test":
        count = settings.prompts.test
        return {
            name: [context for context in task.contexts for _ in range(task.prompts or count)]
            for name, task in settings.evaluation.tasks.items()
            if task.contexts
        }
    chance = random.Random(f"{settings.seed}/{split}/lengths")
    lengths: dict[str, list[int]] = {}
    for group, count in getattr(settings.prompts, split).items():
        shortest, longest = length_range(settings, group)
        logs = math.log(max(1, shortest)), math.log(max(1, longest))
        if count:
            # Evenly spread logarithms, because long prompts take most of the time.
            lengths[group] = [round(math.exp(chance.uniform(*logs))) if longest else 0 for _ in range(count)]
    return lengths


def length_range(settings: Settings, group: str) -> list[int]:
    """Length of a group's shortest and longest prompt in tokens; 0 for bare questions."""
    if group in ("gsm8k", "chat", OWN):
        return [0, 0]
    return settings.prompts.short_contexts if group.endswith("-short") else settings.prompts.contexts


@dataclass
class Makers:
    """Makes prompts from the documents of one split."""

    target: TargetText
    texts: Texts
    split: str

    def __post_init__(self) -> None:
        self.chat_tokens: dict[int, int] = {}  # of a conversation as earlier turns, by the id of its object
        self.packages: dict[str, list[SourceFile]] = {}
        for file in [*self.texts.code, *self.texts.documents]:
            self.packages.setdefault(file.package, []).append(file)

    def records(self, group: str, lengths: list[int], chance: random.Random) -> Iterator[Record]:
        """Prompts of at most these lengths in tokens (0: the bare question). A document recurs after all were used."""
        task = _task_of(group)
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

    def reason(self, group: str) -> str:
        """Why prompts of a group are skipped."""
        task = _task_of(group)
        documents, _ = self._documents(task)
        return "no text is long enough" if documents else f"config key {KEYS.get(task, 'code')}: no text of this split"

    def _documents(self, task: str) -> tuple[Sequence[Any], Make]:
        """The documents of a task, and the function that makes a prompt from one of them."""
        texts = self.texts
        by_task: dict[str, tuple[Sequence[Any], Make]] = {
            "lcc": (texts.code, self.line),
            "repobench-p": (texts.code, self.repository),
            "code-question": (texts.code, partial(self.about_files, QUESTIONS["code"])),
            "document": (texts.documents, partial(self.about_files, QUESTIONS["document"])),
            "edit": (texts.code, lambda file, tokens, _: self.copied(EDIT, file.text, tokens)),
            "quote": (texts.meetings, lambda meeting, tokens, _: self.copied(QUOTE, meeting.transcript, tokens)),
            "qmsum": (texts.meetings, self.meeting),
            "gsm8k": (texts.questions, self.question),
            "chat": (texts.chats, self.conversation),
            OWN: (texts.own, lambda record, *_: record),
            "everyday": (QUESTIONS["everyday"], lambda question, *_: _user(question)),
            "aime24": (texts.problems, lambda problem, *_: _user(TASKS["aime24"].prompt.format(problem=problem))),
        }
        return by_task[task]

    def _prompt(self, wording: Callable[[str], Record], parts: Iterable[str], tokens: int) -> Record | None:
        """A prompt of `tokens` tokens with the end of a text, in whole lines; None if the text is too short.

        wording: maps the text to the prompt. parts: those of the text, the last one first.
        """
        room = tokens - MARGIN - len(self.target.prompt_ids(wording("")))
        text = ""
        for part in parts:
            text = part + text
            if len(text) > LONGEST_TOKEN * room:
                break
        if len(text) < SHORTEST * room:  # not worth tokenizing
            return None
        end, used = self.target.tail(text, room)
        return wording(end) if used >= SHORTEST * room > 0 else None

    def line(self, file: SourceFile, tokens: int, chance: random.Random) -> Record | None:
        """Code completion in one file: the text before one of its lines."""
        if len(file.text) < LEAST_CHARACTERS * tokens:  # not worth tokenizing
            return None
        prompt = TASKS["lcc"].prompt
        code = _beginning(file.text, tokens, chance)
        return self._prompt(lambda context: {"prefix": prompt.format(context=context)}, [code], tokens)

    def repository(self, file: SourceFile, tokens: int, chance: random.Random) -> Record | None:
        """Code completion in a repository: other files of the package, then the text before a line of `file`."""
        share = int(chance.uniform(0.3, 0.6) * tokens)
        code = f"# Path: {file.path}\n" + self.target.tail(_beginning(file.text, share, chance), share)[0]
        prompt = TASKS["repobench-p"].prompt
        others = map(_with_path, _others(self.packages[file.package], file, chance))
        return self._prompt(lambda context: {"prefix": prompt.format(context=context, input=code)}, others, tokens)

    def about_files(
        self, questions: Sequence[str], file: SourceFile, tokens: int, chance: random.Random
    ) -> Record | None:
        """Files of a package or a collection, the given one last, and a request about them."""
        question = chance.choice(questions)
        files = map(_with_path, [file, *_others(self.packages[file.package], file, chance)])
        return self._prompt(lambda text: _user(f"{text}\n\n{question}"), files, tokens)

    def copied(self, prompt: str, text: str, tokens: int) -> Record | None:
        """A prompt whose answer repeats the lines of a text."""
        return self._prompt(lambda lines: _user(prompt.format(text=lines)), [text], tokens)

    def meeting(self, meeting: Meeting, tokens: int, chance: random.Random) -> Record | None:
        """A part of a meeting's transcript, in a long prompt after other meetings, and a query about the meeting."""
        prompt, query = TASKS["qmsum"].prompt, chance.choice(meeting.queries)
        own = _beginning(meeting.transcript, tokens, chance)
        others = (f"{other.transcript}\n" for other in _others(self.texts.meetings, meeting, chance))
        return self._prompt(lambda text: _user(prompt.format(context=text, input=query)), chain([own], others), tokens)

    def question(self, question: tuple[str, str], tokens: int, chance: random.Random) -> Record | None:
        """A question, preceded by worked questions that fill `tokens` tokens."""
        if not tokens:
            return _user(question[0])
        worked = (
            f"Question: {one}\nAnswer: {answer}\n\n" for one, answer in _others(self.texts.questions, question, chance)
        )
        return self._prompt(lambda text: _user(f"{text}Question: {question[0]}\nAnswer:"), worked, tokens)

    def conversation(self, turns: list[Turn], tokens: int, chance: random.Random) -> Record | None:
        """A user turn, preceded by other conversations as earlier turns that fill `tokens` tokens."""
        asked, earlier = turns[:-1], list[Turn]()
        if not tokens:
            return {"messages": asked}
        room = tokens - MARGIN - len(self.target.prompt_ids({"messages": asked}))
        for others in _others(self.texts.chats, turns, chance):
            if (size := self.chat_tokens.get(id(others))) is None:
                text = "\n".join(turn["content"] for turn in others)
                size = self.chat_tokens[id(others)] = self.target.count(text) + self.target.exchange_overhead
            if size <= room:
                earlier += others
                room -= size
            if room < (1 - SHORTEST) * tokens:
                return {"messages": [*earlier, *asked]}
        return None


def _task_of(group: str) -> str:
    return group.removesuffix("-long").removesuffix("-short")


def _beginning(text: str, tokens: int, chance: random.Random) -> str:
    """A text up to a random line, with `tokens` tokens if it has that many."""
    least = min(LEAST_CHARACTERS * tokens, len(text))
    return text[: text.rfind("\n", 0, chance.randint(least, len(text))) + 1]


def _others(documents: Sequence[T], asked: T, chance: random.Random) -> Iterator[T]:
    """Random documents other than the asked one."""
    return (other for other in chance.sample(documents, min(CANDIDATES, len(documents))) if other is not asked)


def _with_path(file: SourceFile) -> str:
    return f"# Path: {file.path}\n{file.text}\n"


def _user(content: str) -> Record:
    return {"messages": [{"role": "user", "content": content}]}
