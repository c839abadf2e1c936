"""The benchmark tasks: their files, their prompts, and which prompts a run keeps.

Prompts and lengths of answers are LongBench's (arXiv 2308.14508); the chat format around them is the draft's (SPEC 3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec.data.records import Record, RecordError, located, parse_record, text_of
from longspec.data.templates import TURN_FORMATS, chat_prompt, encode_texts
from longspec.errors import UserError

MIN_PROMPT_LEN = 1200
HEADROOM = 2000


@dataclass(frozen=True)
class Task:
    """One benchmark: how a record becomes a prompt, and how long the answer may be."""

    prompt: str
    """Text with {field} for each field of the record that it quotes."""
    fields: tuple[str, ...]
    max_new_tokens: int
    id_field: str = "_id"
    answer_prefix: str = ""
    """The word that opens the assistant's answer in the published chat format."""
    filtered: bool = True
    """Whether prompts outside the range of lengths are left out."""


TASKS = {
    "gov_report": Task(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        ("context",),
        512,
        answer_prefix="Summary:",
    ),
    "qmsum": Task(
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\n"
        "Now, answer the query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}\nAnswer:",
        ("context", "input"),
        512,
        answer_prefix="Answer:",
    ),
    "multi_news": Task(
        "You are given several news passages. Write a one-page summary of all news. \n\n"
        "News:\n{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        ("context",),
        512,
        answer_prefix="Summary:",
    ),
    "lcc": Task("Please complete the code given below. \n{context}Next line of code:\n", ("context",), 64),
    "repobench-p": Task(
        "Please complete the code given below. \n{context}{input}Next line of code:\n", ("context", "input"), 64
    ),
    "aime24": Task("{problem}", ("problem",), 20000, id_field="id", filtered=False),
}


@dataclass(frozen=True)
class Question:
    """A record's id and its prompt, before the chat format."""

    id: str
    prompt: str


@dataclass(frozen=True)
class Sample:
    """A prompt as the target reads it."""

    id: str
    token_ids: list[int]


@dataclass
class Selection:
    """The samples of a run, and the prompts it leaves out."""

    samples: list[Sample]
    too_short: int = 0
    too_long: int = 0
    not_reached: int = 0
    """Records behind the last one that `--test_length` asks for."""

    def describe(self, task: str, shortest: int, longest: int) -> str:
        """One line: how many prompts are kept, and how many are left out for what."""
        line = f"{task}: {len(self.samples)} prompts kept, {self.too_short + self.too_long} left out"
        if self.too_short + self.too_long:
            line += f" ({self.too_short} of {shortest} tokens or fewer, {self.too_long} of more than {longest} tokens)"
        return line + (f"; {self.not_reached} not reached, by --test_length" if self.not_reached else "")


def read_questions(name: str, folder: str | Path) -> list[Question]:
    """All records of FOLDER/NAME.jsonl as questions. Raises UserError with file, line and field."""
    task, path = TASKS[name], Path(folder) / f"{name}.jsonl"
    if not path.is_file():
        raise UserError(f"{path}: no such file; --data_path_prefix names the folder that holds {name}.jsonl")
    questions = []
    with path.open("rb") as handle:
        for number, raw in enumerate(handle, 1):
            if raw.strip():
                record = parse_record(str(path), number, raw)
                with located(str(path), number):
                    questions.append(_question(task, record))
    if not questions:
        raise UserError(f"{path}: no record, all lines are blank")
    return questions


def _question(task: Task, record: Record) -> Question:
    identity = record.get(task.id_field)
    if not isinstance(identity, str | int):
        raise RecordError(task.id_field, "is missing; it must be a string or a whole number")
    quoted = {field: text_of(record.get(field), field) for field in task.fields}
    return Question(str(identity), task.prompt.format(**quoted))


def encode_question(question: Question, task: Task, family: str, tokenizer: Any, chat_format: str) -> Sample:
    """The prompt in the chat format of the target's family, as token ids."""
    led_in = chat_format == "published" and TURN_FORMATS[family].leads_in_answers
    prefix = task.answer_prefix if led_in else ""
    text = chat_prompt(question.prompt, family, tokenizer, chat_format, prefix)
    return Sample(question.id, encode_texts([text], tokenizer)[0])


def select_samples(
    name: str,
    questions: Sequence[Question],
    family: str,
    tokenizer: Any,
    chat_format: str,
    test_length: int = 0,
    shortest: int = 0,
    longest: int = 0,
) -> Selection:
    """The first `test_length` questions (0: all) whose prompt has shortest < n <= longest tokens.

    Tasks that are not filtered keep every length. Raises UserError if no prompt is left.
    """
    task, selection = TASKS[name], Selection([])
    for number, question in enumerate(questions):
        if test_length and len(selection.samples) == test_length:
            selection.not_reached = len(questions) - number
            break
        sample = encode_question(question, task, family, tokenizer, chat_format)
        if task.filtered and len(sample.token_ids) <= shortest:
            selection.too_short += 1
        elif task.filtered and len(sample.token_ids) > longest:
            selection.too_long += 1
        else:
            selection.samples.append(sample)
    if not selection.samples:
        raise UserError(f"{selection.describe(name, shortest, longest)}; see --min_prompt_len and --headroom")
    return selection
