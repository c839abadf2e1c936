"""Step `prompts`: prompts for training, validation and the test, cut to lengths in tokens, in LongBench's wording."""

import json
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from itertools import chain
from pathlib import Path
from typing import Any, TypeVar

from tqdm import tqdm

from experiments.answers import write_chat
from experiments.files import answers_file, claim, prompts_file, read_jsonl, write_atomically
from experiments.settings import Settings
from experiments.sources import SPLITS, CodeFile, Meeting, Texts, read_code, read_texts
from experiments.target import LONGEST_TOKEN, TargetText
from longspec.longbench.tasks import TASKS

T = TypeVar("T")
Record = dict[str, Any]
Turn = dict[str, str]
Make = Callable[[Any, int, random.Random], Record | None]
"""(document, tokens, random numbers) -> prompt, or None if the document is too short."""

SHORTEST = 0.85
"""Least length of a prompt as a share of the length that is asked for."""
MARGIN = 8
"""Tokens of a prompt left free, because two texts joined may have more tokens than each alone."""
LEAST_CHARACTERS = 2
"""Average characters per token of code, at least."""
CANDIDATES = 300
"""Documents tried to fill a prompt with worked questions or earlier turns."""
TRIES = 20
"""Documents tried per prompt."""


def write_prompts(settings: Settings, root: Path) -> None:
    """Write all groups that are missing. Groups without documents are left out, and a line says so."""
    if settings.text is None:
        print("no text folder (--text): gsm8k, qmsum and aime24 are left out")
    write_chat(settings, root)
    common = {"target": settings.target, "with_text": settings.text is not None, "seed": settings.seed}
    common["code"] = asdict(settings.code)
    missing: dict[str, dict[str, list[int]]] = {}
    for split in SPLITS:
        plan = planned_lengths(settings, split)
        facts = common | {
            group: {"prompts": len(n), "shortest": min(n), "longest": max(n)} for group, n in plan.items() if n
        }
        claim(root / "prompts" / split / "settings.json", facts)
        missing[split] = {
            group: lengths
            for group, lengths in plan.items()
            if lengths and not prompts_file(root, split, group).exists()
        }
    if not any(missing.values()):
        return
    target, code = TargetText.load(settings.target), read_code(settings.code, settings.seed)
    for split, plan in missing.items():
        makers = Makers(target, read_texts(settings.text, split), code[split], chat_turns(root, split), split)
        with ThreadPoolExecutor() as pool:  # tokenizing releases the interpreter's lock
            tasks = [
                pool.submit(write_group, makers, group, lengths, settings.seed, prompts_file(root, split, group))
                for group, lengths in plan.items()
            ]
        for task in tasks:
            task.result()


def write_group(makers: "Makers", group: str, lengths: list[int], seed: int, file: Path) -> None:
    """Write the prompts of one group."""
    records = list(makers.records(group, lengths, random.Random(f"{seed}/{makers.split}/{group}")))
    write_atomically(file, "".join(json.dumps(record) + "\n" for record in records))
    left_out = f", {len(lengths) - len(records)} left out" if len(records) < len(lengths) else ""
    tqdm.write(f"prompts, {makers.split}, {group}: {len(records)}{left_out}")


def planned_lengths(settings: Settings, split: str) -> dict[str, list[int]]:
    """By group, the length of every prompt in tokens; 0 is the bare question."""
    if split == "test":
        tasks, count = settings.evaluation.tasks, settings.prompts.test
        return {name: [context for context in task.contexts for _ in range(count)] for name, task in tasks.items()}
    shortest, longest = settings.prompts.contexts
    chance = random.Random(f"{settings.seed}/{split}/lengths")
    counts: dict[str, int] = getattr(settings.prompts, split)
    return {
        group: [0 if group == "gsm8k" else chance.randint(shortest, longest) for _ in range(count)]
        for group, count in counts.items()
    }


def chat_turns(root: Path, split: str) -> list[list[Turn]]:
    """The finished conversations of a split."""
    file = answers_file(root, "chat", split)
    return [record["messages"] for record in read_jsonl(file) if record["finished"]] if file.exists() else []


class Makers:
    """The prompts that one split's documents allow."""

    def __init__(
        self, target: TargetText, texts: Texts, code: list[CodeFile], chats: list[list[Turn]], split: str
    ) -> None:
        self.target, self.texts, self.code, self.chats, self.split = target, texts, code, chats, split
        self.packages: dict[str, list[CodeFile]] = {}
        for file in code:
            self.packages.setdefault(file.package, []).append(file)

    def records(self, group: str, lengths: list[int], chance: random.Random) -> Iterator[Record]:
        """Prompts of at most these lengths in tokens (0: the bare question); documents recur once all were used."""
        task = group.removesuffix("-long")
        documents, make = self._documents(task)
        order: list[Any] = []
        for number, length in enumerate(tqdm(lengths, desc=f"{self.split} {group}", disable=None, leave=False)):
            for _ in range(min(TRIES, len(documents))):
                order = order or chance.sample(documents, len(documents))
                record = make(order.pop(), length, chance)
                if record is not None:
                    yield {"id": f"{group}-{self.split}-{number}", "task": task, "length": length, **record}
                    break

    def _documents(self, task: str) -> tuple[list[Any], Make]:
        """What a task asks about, and what makes a prompt of it, or None if the document is too short."""
        if task in ("lcc", "repobench-p"):
            return self.code, self.line if task == "lcc" else self.repository
        if task == "qmsum":
            return self.texts.meetings, self.meeting
        if task == "gsm8k":
            return self.texts.questions, self.question
        if task == "chat":
            return self.chats, self.conversation
        return self.texts.problems, lambda problem, tokens, chance: _user(
            TASKS["aime24"].prompt.format(problem=problem)
        )

    def line(self, file: CodeFile, tokens: int, chance: random.Random) -> Record | None:
        """A file up to one of its lines."""
        room = tokens - MARGIN - self.target.count(TASKS["lcc"].prompt.format(context=""))
        code = self._before_line(file, room, chance)
        return None if code is None else {"prefix": TASKS["lcc"].prompt.format(context=code)}

    def repository(self, file: CodeFile, tokens: int, chance: random.Random) -> Record | None:
        """Other files of the package, then a file up to one of its lines."""
        prompt, heading = TASKS["repobench-p"].prompt, f"# Path: {file.path}\n"
        room = tokens - MARGIN - self.target.count(prompt.format(context="", input=heading))
        code = self._before_line(file, int(chance.uniform(0.3, 0.6) * room), chance)
        others = [other for other in self.packages[file.package] if other is not file]
        if code is None or not others:
            return None
        room -= self.target.count(code)
        least, context = (1 - SHORTEST) * tokens, []
        for other in chance.sample(others, len(others)):
            piece, used = self.target.head(f"# Path: {other.path}\n{other.text}\n", room)
            context.append(piece)
            room -= used
            if room < least:
                return {"prefix": prompt.format(context="".join(context), input=heading + code)}
        return None

    def _before_line(self, file: CodeFile, tokens: int, chance: random.Random) -> str | None:
        """Whole lines of this number of tokens that end before a line of code; None if the file is too short."""
        least = LEAST_CHARACTERS * tokens
        if tokens < 1 or least >= len(file.text):
            return None
        end = file.text.rfind("\n", 0, chance.randint(least, len(file.text))) + 1
        code, used = self.target.tail(file.text[:end], tokens)
        return code if used >= SHORTEST * tokens else None

    def meeting(self, meeting: Meeting, tokens: int, chance: random.Random) -> Record | None:
        """A part of a meeting and one of the queries on it."""
        prompt, query = TASKS["qmsum"].prompt, chance.choice(meeting.queries)
        fixed = self.target.count(prompt.format(context="", input=query)) + self.target.chat_overhead
        room, transcript = tokens - MARGIN - fixed, meeting.transcript
        start = chance.randrange(max(1, len(transcript) - 5 * max(0, room)))
        start = transcript.find("\n", start) + 1 if start else 0
        part, used = self.target.head(transcript[start:], room)
        return _user(prompt.format(context=part, input=query)) if used >= SHORTEST * room > 0 else None

    def question(self, question: tuple[str, str], tokens: int, chance: random.Random) -> Record | None:
        """A question, after worked ones up to this number of tokens."""
        if not tokens:
            return _user(question[0])
        asked = f"Question: {question[0]}\nAnswer:"
        room = tokens - MARGIN - self.target.count(asked) - self.target.chat_overhead
        shown = self._fill(self.texts.questions, question, _worked, room, tokens, chance)
        return None if shown is None else _user("".join(map(_worked, shown)) + asked)

    def conversation(self, turns: list[Turn], tokens: int, chance: random.Random) -> Record | None:
        """A user turn, after other conversations as earlier turns up to this number of tokens."""
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
        """Random documents other than `asked` that leave at most 1 - SHORTEST of `tokens` free of `room`, or None.

        text: of a document; extra: tokens that each takes in addition.
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
