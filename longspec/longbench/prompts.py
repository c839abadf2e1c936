"""The prompts of a run: read from a task's file, encoded for the target, and selected by length."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from longspec.data.records import Record, RecordError, read_records, text_of
from longspec.data.templates import chat_prompt, check_template, encode_texts, lead_in
from longspec.errors import UserError, first_line
from longspec.longbench.tasks import TASKS

DEFAULT_MIN_PROMPT_LEN = 1200
"""Prompts of this many tokens or fewer are left out."""
DEFAULT_HEADROOM = 2000
"""Positions of the target's context that a prompt must leave free."""


@dataclass(frozen=True)
class TaskPrompt:
    """A prompt as the target reads it."""

    id: str
    token_ids: list[int]


@dataclass
class Selection:
    """The prompts of a run, and the number of those that it leaves out for each reason."""

    prompts: list[TaskPrompt]
    too_short: int = 0
    too_long: int = 0

    def describe(self, task: str, shortest: int, longest: int) -> str:
        """One line: the number of prompts that are kept, and of those that are left out for each reason."""
        left_out = self.too_short + self.too_long
        line = f"{task}: {len(self.prompts)} prompts kept, {left_out} left out"
        if left_out:
            line += f" ({self.too_short} of {shortest} tokens or fewer, {self.too_long} of more than {longest} tokens)"
        return line


def read_prompt(file: str | Path, task: str) -> str:
    """The prompt of a task in a JSON file in the format of LongBench's dataset2prompt.json. Raises UserError."""
    try:
        prompts = json.loads(Path(file).read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or first_line(error)
        raise UserError(f"--prompt_file: {file} is not a readable JSON file {{task: prompt}} ({reason})") from error
    if not isinstance(prompts, dict) or task not in prompts:
        raise UserError(f"--prompt_file: {file} has no prompt for {task}; it must be an object {{task: prompt}}")
    # LongBench's records all have `context` and `input`, even where its own prompt quotes one.
    fields = ("context", "input") if "{context}" in TASKS[task].prompt else ("problem",)
    return check_template(prompts[task], fields, f"--prompt_file: {file}, {task}")


def read_questions(
    name: str, folder: str | Path, family: str, tokenizer: Any, chat_format: str, prompt: str | None
) -> list[tuple[str, str]]:
    """Id and prompt of each record of FOLDER/NAME.jsonl. prompt: replaces the task's. Raises UserError."""
    task = TASKS[name]
    path = Path(folder) / f"{name}.jsonl"
    if not path.is_file():
        raise UserError(f"{path}: no such file; --data_path_prefix names the folder that holds {name}.jsonl")
    template = prompt or (task.published_prompt if chat_format == "published" else task.prompt)
    answer_prefix = "" if prompt else lead_in(task.answer_prefix, family, chat_format)

    def question(record: Record) -> tuple[str, str]:
        identity = record.get(task.id_field)
        # Results name samples by this id, so it must exist and print in one line.
        if not isinstance(identity, str | int):
            raise RecordError(task.id_field, "is missing; it must be a string or a whole number")
        # Only the quoted fields must be text; a record may hold anything else.
        fields = {field for _, field, _, _ in Formatter().parse(template) if field}
        values = {field: text_of(record.get(field), field) for field in fields}
        return str(identity), chat_prompt(template.format(**values), family, tokenizer, chat_format, answer_prefix)

    if not (questions := list(read_records(path, question))):
        raise UserError(f"{path}: no record, all lines are blank")
    return questions


def select_prompts(
    name: str, questions: Sequence[tuple[str, str]], tokenizer: Any, test_length: int, shortest: int, longest: int
) -> Selection:
    """The first `test_length` prompts (0: all) that have n tokens with shortest < n <= longest.

    questions: as `read_questions` returns them. Tasks that are not filtered keep every length. Raises UserError if no
    prompt is left.
    """
    # AIME's prompts are short; only its answers are long.
    filtered = TASKS[name].filtered
    selection = Selection([])
    for identity, text in questions:
        if test_length and len(selection.prompts) == test_length:
            break
        # Encoded one by one, because encoding stops at `test_length`.
        (token_ids,) = encode_texts([text], tokenizer)
        if filtered and len(token_ids) <= shortest:
            selection.too_short += 1
        elif filtered and len(token_ids) > longest:
            selection.too_long += 1
        else:
            selection.prompts.append(TaskPrompt(identity, token_ids))
    if not selection.prompts:
        raise UserError(f"{selection.describe(name, shortest, longest)}; see --min_prompt_len and --headroom")
    return selection
