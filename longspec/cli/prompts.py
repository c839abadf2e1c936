"""The prompts of `longspec generate` and `longspec bench`: from arguments, stdin, text and JSONL files."""

import os
import sys
from collections.abc import Iterable, Iterator, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from longspec.data.aligners import Turn, common_form_aligner
from longspec.data.lines import SUFFIXES as JSONL
from longspec.data.lines import Line, text_lines
from longspec.data.record_fields import check_sampling, unread_fields, unread_note
from longspec.data.records import KIND_FIELDS, WHERE, Record, RecordError, read_records, text_of
from longspec.errors import UserError, os_errors

TEXT = (".txt",)
"""Suffixes of text files, in any case."""
UNREAD = (".csv", ".tsv", ".parquet", ".arrow", ".yaml", ".yml", ".md", ".gz", ".zst", ".xz", ".bz2", ".zip")
"""Suffixes of data files that are not read."""
STDIN = "-"


@dataclass(frozen=True)
class Prompt:
    """A prompt as the user wrote it."""

    location: str
    """File and line, or the number of the argument."""
    content: str | list[Turn]
    """Text, or a conversation that ends with a user turn."""
    id: Any = None
    """The record's own `id`, if it has one."""
    unread: Set[str] = frozenset()
    """The fields of its record that nothing reads."""

    @property
    def record(self) -> dict[str, Any]:
        """The fields that identify the prompt in a line of results."""
        fields = {} if self.id is None else {"id": self.id}
        return fields | {"prompt" if isinstance(self.content, str) else "messages": self.content}


def read_prompts(sources: Sequence[str]) -> list[Prompt]:
    """The prompts of all sources in order. A source is a file, "-" for stdin, or a prompt itself.

    Text files and stdin have one prompt per line, JSONL files a record; blank lines are skipped. Without a source,
    stdin is read. Raises UserError for a missing file or one of another suffix, and for a line that is not a prompt,
    with its location. A line on stderr names the fields of records that nothing reads.
    """
    if not sources and sys.stdin.isatty():
        raise UserError("no prompts: give them as arguments, as .txt or .jsonl files, or on stdin")
    prompts = [one for number, source in enumerate(sources or [STDIN], 1) for one in _read(source, number)]
    if not prompts:
        raise UserError(f"no prompts in {', '.join(sources) or 'stdin'}: all lines are blank")
    if unread := set().union(*(prompt.unread for prompt in prompts)):
        print(unread_note(unread), file=sys.stderr)
    return prompts


def _read(source: str, number: int) -> Iterator[Prompt]:
    """The prompts of one source; `number` counts the sources from 1."""
    suffix = Path(source).suffix.lower()
    exists = os.path.exists(source)  # unlike pathlib, does not raise for a prompt that cannot be a name
    if source == STDIN:
        yield from _text_prompts(("stdin", line, raw) for line, raw in enumerate(sys.stdin.buffer, 1))
    # A name without spaces counts as a file even if the file is missing, so that a misspelled name is an error.
    elif not exists and suffix in (*TEXT, *JSONL, *UNREAD) and len(source.split()) == 1:
        raise UserError(f"{source}: no such file; if the text itself is the prompt, give it on stdin")
    elif exists and suffix in (*TEXT, *JSONL):
        with os_errors(f"{source}: cannot be read"):
            yield from _text_prompts(text_lines(source)) if suffix in TEXT else read_records(source, _prompt)
    elif exists:
        kind = "a folder" if os.path.isdir(source) else "a file of an unknown kind"
        raise UserError(f"{source}: {kind}; give a file with one of the suffixes {', '.join((*TEXT, *JSONL))}")
    elif not source.strip():
        raise UserError(f"prompt {number}: it is empty")
    else:
        yield Prompt(f"prompt {number}", decoded(os.fsencode(source), f"prompt {number}"))


def decoded(content: bytes, name: str) -> str:
    """UTF-8 text, without the byte order mark that editors on Windows put first. Raises UserError."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise UserError(f"{name}: not UTF-8 text ({error.reason} at byte {error.start})") from error


def _text_prompts(lines: Iterable[Line]) -> Iterator[Prompt]:
    for name, number, raw in lines:
        location = f"{name}, line {number}"
        if text := decoded(raw, location).strip():
            yield Prompt(location, text)


def _prompt(record: Record) -> Prompt:
    whole = _with_answer(record)
    location = "{}, line {}".format(*record[WHERE].rsplit(":", 1))
    return Prompt(location, common_form_aligner()(whole)["prompt"], record.get("id"), unread_fields(whole))


def _with_answer(record: Record) -> Record:
    """A record with `prompt` or `messages`, with an empty answer that gives it a kind. Raises RecordError."""
    text, turns = record.get("prompt"), record.get("messages")
    if (text is None) == (turns is None):
        problem = "is missing, and so is 'messages'" if text is None else "must not be given along with 'messages'"
        raise RecordError("prompt", problem)
    check_sampling(record)
    # The aligner reads training records, which end with an answer. Answers of other kinds are not read.
    others = {name: value for name, value in record.items() if name not in KIND_FIELDS or name == "suffix"}
    if text is not None:
        if not text_of(text, "prompt"):
            raise RecordError("prompt", "is empty")
        return {**others, "prompt": text, "completion": ""}
    last = turns[-1] if isinstance(turns, list) and turns else {"role": "assistant"}
    if isinstance(last, dict) and last.get("role") == "assistant":
        raise RecordError("messages", "must be a list of turns that ends with a user turn")
    return {**others, "messages": [*record["messages"], {"role": "assistant", "content": ""}]}
