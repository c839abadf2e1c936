"""The benchmark tasks: their files, their prompts, and which prompts a run keeps.

Prompts and lengths of answers are LongBench's (arXiv 2308.14508). In the published chat format the prompts are the
published ones, which end differently.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from longspec.data.records import Record, RecordError, located, parse_record, text_of
from longspec.data.templates import chat_prompt, check_template, encode_texts, lead_in
from longspec.errors import UserError, first_line

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
    published_prompt: str | None = None
    """The prompt in the published chat format; None: the same."""


LONGBENCH_FIELDS = ("context", "input")
PUBLISHED_CODE_PROMPT = "Please complete the code given below. \n{context}Now, complete the code given."
TASKS = {
    "gov_report": Task(
        "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{context}\n\nNow, write a one-page summary of the report.\n\nSummary:",
        ("context",),
        512,
        answer_prefix="Summary:",
        published_prompt="You are given a report by a government agency. Write a one-page summary of the report.\n\n"
        "Report:\n{context}\n\nNow, write a one-page summary of the report.",
    ),
    "qmsum": Task(
        "You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\n"
        "Now, answer the query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}\nAnswer:",
        ("context", "input"),
        512,
        answer_prefix="Answer:",
        published_prompt="You are given a meeting transcript and a query containing a question or instruction. "
        "Answer the query in one or more sentences.\n\nTranscript:\n{context}\n\n"
        "Now, answer the query based on the above meeting transcript in one or more sentences.\n\n"
        "Query: {input}",
    ),
    "multi_news": Task(
        "You are given several news passages. Write a one-page summary of all news. \n\n"
        "News:\n{context}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
        ("context",),
        512,
        answer_prefix="Summary:",
        published_prompt="You are given several news passages. Write a one-page summary of all news. \n\n"
        "News:\n{context}\n\nNow, write a one-page summary of all the news.",
    ),
    "lcc": Task(
        "Please complete the code given below. \n{context}Next line of code:\n",
        ("context",),
        64,
        published_prompt=PUBLISHED_CODE_PROMPT,
    ),
    "repobench-p": Task(
        "Please complete the code given below. \n{context}{input}Next line of code:\n",
        ("context", "input"),
        64,
        published_prompt=PUBLISHED_CODE_PROMPT,
    ),
    "aime24": Task("{problem}", ("problem",), 20000, id_field="id", filtered=False),
}


@dataclass(frozen=True)
class Question:
    """A record's id, its prompt before the chat format, and the word that opens its answer."""

    id: str
    prompt: str
    answer_prefix: str = ""


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


def read_prompt(file: str | Path, name: str) -> str:
    """The prompt of task NAME in a JSON file {task: prompt}, the form of LongBench's own dataset2prompt.json.

    Raises UserError for another file, one without this task, and a prompt that quotes a field the task does not have.
    """
    try:
        prompts = json.loads(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"--prompt_file: {file} is no readable JSON file ({first_line(error)})") from error
    if not isinstance(prompts, dict) or name not in prompts:
        raise UserError(f"--prompt_file: {file} has no prompt for {name}; it must be an object {{task: prompt}}")
    fields = LONGBENCH_FIELDS if "context" in TASKS[name].fields else TASKS[name].fields
    return check_template(prompts[name], fields, f"--prompt_file: {file}, {name}")


def read_questions(
    name: str, folder: str | Path, family: str = "", chat_format: str = "tokenizer", prompt: str | None = None
) -> list[Question]:
    """All records of FOLDER/NAME.jsonl as questions for a target of `family` in `chat_format`.

    prompt: in place of the task's own, without a word that opens the answer. Raises UserError with file, line and
    field.
    """
    task, path = TASKS[name], Path(folder) / f"{name}.jsonl"
    if not path.is_file():
        raise UserError(f"{path}: no such file; --data_path_prefix names the folder that holds {name}.jsonl")
    published = task.published_prompt if chat_format == "published" else None
    text = prompt or published or task.prompt
    prefix = "" if prompt else lead_in(task.answer_prefix, family, chat_format)
    questions = []
    with path.open("rb") as handle:
        for number, raw in enumerate(handle, 1):
            if raw.strip():
                record = parse_record(str(path), number, raw)
                with located(str(path), number):
                    questions.append(_question(task, record, text, prefix))
    if not questions:
        raise UserError(f"{path}: no record, all lines are blank")
    return questions


def _question(task: Task, record: Record, prompt: str, answer_prefix: str) -> Question:
    identity = record.get(task.id_field)
    if not isinstance(identity, str | int):
        raise RecordError(task.id_field, "is missing; it must be a string or a whole number")
    fields = {name for _, name, _, _ in Formatter().parse(prompt) if name}
    quoted = {field: text_of(record.get(field), field) for field in fields}
    return Question(str(identity), prompt.format(**quoted), answer_prefix)


def encode_question(question: Question, family: str, tokenizer: Any, chat_format: str) -> Sample:
    """The prompt in the chat format of the target, as token ids."""
    text = chat_prompt(question.prompt, family, tokenizer, chat_format, question.answer_prefix)
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
        sample = encode_question(question, family, tokenizer, chat_format)
        if task.filtered and len(sample.token_ids) <= shortest:
            selection.too_short += 1
        elif task.filtered and len(sample.token_ids) > longest:
            selection.too_long += 1
        else:
            selection.samples.append(sample)
    if not selection.samples:
        raise UserError(f"{selection.describe(name, shortest, longest)}; see --min_prompt_len and --headroom")
    return selection
