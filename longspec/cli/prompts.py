"""The prompts of `longspec generate` and `longspec bench`: from arguments, stdin, .txt and .jsonl files."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec.data.aligners import Turn, common_form_aligner
from longspec.data.records import WHERE, Record, RecordError, located, parse_record, text_of
from longspec.errors import UserError

TEXT, JSONL, STDIN = ".txt", ".jsonl", "-"


@dataclass(frozen=True)
class Prompt:
    """A prompt as it was given."""

    where: str
    """File and line, or the number of the argument."""
    content: str | list[Turn]
    """Text, or a conversation that ends with a user turn."""
    id: Any = None
    """The record's own `id`, if it has one."""

    @property
    def record(self) -> dict[str, Any]:
        """The fields that identify it in a line of results."""
        named = {} if self.id is None else {"id": self.id}
        return named | {"prompt" if isinstance(self.content, str) else "messages": self.content}


def read_prompts(sources: Sequence[str]) -> list[Prompt]:
    """The prompts of all sources in order: .txt and .jsonl files, "-" for stdin, and any other source as it is.

    Files of text and stdin have a prompt per line; blank lines are left out. Without a source, stdin is read.
    Raises UserError for what is not there or not a prompt, with its place.
    """
    if not sources and sys.stdin.isatty():
        raise UserError("no prompts: give them as arguments, as .txt or .jsonl files, or on stdin")
    prompts = [prompt for number, source in enumerate(sources or [STDIN], 1) for prompt in _read(source, number)]
    if not prompts:
        raise UserError(f"no prompts in {', '.join(sources) or 'stdin'}: all lines are blank")
    return prompts


def _read(source: str, number: int) -> Iterator[Prompt]:
    suffix = Path(source).suffix if "\n" not in source else ""
    if source == STDIN:
        yield from _text_lines("stdin", sys.stdin.buffer.read())
    elif suffix in (TEXT, JSONL) and (Path(source).is_file() or " " not in source):
        try:
            content = Path(source).read_bytes()
        except OSError as error:
            raise UserError(f"{source}: cannot be read ({error.strerror})") from error
        yield from _text_lines(source, content) if suffix == TEXT else _records(source, content)
    elif not source.strip():
        raise UserError(f"prompt {number}: it is empty")
    else:
        yield Prompt(f"prompt {number}", source)


def _text_lines(name: str, content: bytes) -> Iterator[Prompt]:
    for number, raw in enumerate(content.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        try:
            line = raw.decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise UserError(f"{name}, line {number}: not UTF-8 text ({error.reason})") from error
        if line:
            yield Prompt(f"{name}, line {number}", line)


def _records(name: str, content: bytes) -> Iterator[Prompt]:
    for number, raw in enumerate(content.split(b"\n"), 1):
        if raw.strip():
            record = parse_record(name, number, raw)
            with located(name, number):
                yield Prompt(f"{name}, line {number}", _content(record), record.get("id"))


def _content(record: Record) -> str | list[Turn]:
    """The text in `prompt`, or the turns in `messages`. Raises RecordError."""
    given = [name for name in ("prompt", "messages") if record.get(name) is not None]
    if len(given) != 1:
        problem = "is missing, and so is 'messages'" if not given else "must not be given along with 'messages'"
        raise RecordError("prompt", problem)
    if given == ["prompt"]:
        text = text_of(record["prompt"], "prompt")
        if not text:
            raise RecordError("prompt", "is empty")
        return text
    turns = record["messages"]
    if (
        not isinstance(turns, list)
        or not turns
        or (isinstance(turns[-1], dict) and turns[-1].get("role") == "assistant")
    ):
        raise RecordError("messages", "must be a list of turns that ends with a user turn")
    asked = {"id": "", WHERE: record[WHERE], "messages": [*turns, {"role": "assistant", "content": ""}]}
    return common_form_aligner()(asked)["prompt"]
