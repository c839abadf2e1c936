"""Prompts for a target, read from records or started by its chat template, and the records of its answers."""

import hashlib
import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from longspec.chat_template import template_text
from longspec.data.aligners import ROLES, Turn, as_turns, common_form_aligner
from longspec.data.lines import Files, data_files
from longspec.data.record_fields import check_sampling, unread_fields
from longspec.data.records import (
    KINDS,
    SOURCE_TAGS,
    TURN_KINDS,
    Record,
    RecordError,
    located,
    parse_record,
    split_pairs,
)
from longspec.data.templates import CONTINUED_KINDS, apply_template, composed, conversation_text
from longspec.digests import file_digests
from longspec.errors import UserError

LOOP_NGRAM = 4
"""Length of the n-grams that are counted, in tokens."""
LOOP_SHARE = 0.5
"""Share of distinct n-grams below which a text is a repetition loop."""
LOOP_TAIL = 128
"""Tokens at the end of a text in which a loop is also looked for."""
PLACEHOLDER = "USER-TURN"
"""Text that marks the content of a user turn in the output of a chat template."""


@dataclass(frozen=True)
class SourcePrompt:
    """A prompt without its answer."""

    source_id: str
    turns: list[Turn]
    """Conversation up to a user turn; empty if the target continues plain text."""
    text: str
    """Its text in the chat format."""


class PromptFiles:
    """The prompts in JSONL files. All records are checked when the files are opened."""

    def __init__(self, files: Files) -> None:
        """Raises UserError for a missing file, and for a record without a prompt, with its file, line and field."""
        paths = data_files(files)
        self.digests = dict(zip(paths, file_digests(paths), strict=True))
        """The digest of each file, by path."""
        self.unread: set[str] = set()
        """The fields of the records that nothing reads."""
        self.lines: list[tuple[str, int, int, int]] = []
        """File, line number from 1, byte offset and number of bytes of each record."""
        for path in paths:
            start = 0
            with open(path, "rb") as handle:
                for number, raw in enumerate(handle, 1):
                    if raw.strip():
                        # Converted once only for its errors; the text is read again when it is needed.
                        with located(path, number):
                            record = _with_answer(parse_record(path, number, raw))
                            self.unread |= unread_fields(record)
                            _prompts(record)
                        self.lines.append((path, number, start, len(raw)))
                    start += len(raw)
        if not self.lines:
            raise UserError(f"no record in {', '.join(self.digests)}: all lines are blank")

    def __len__(self) -> int:
        return len(self.lines)

    def read(
        self, start: int, end: int, family: str, tokenizer: Any, chat_format: str, rejected: list[str]
    ) -> Iterator[SourcePrompt]:
        """The prompts of records `start` … `end` - 1, without those that the chat template rejects.

        A record with a list of articles has one prompt per article. rejected: gets the reason, with file and line, for
        each prompt that is left out.
        """
        for path, number, offset, _ in self.lines[start:end]:
            with open(path, "rb") as handle:
                handle.seek(offset)
                record = parse_record(path, number, handle.readline())
            for prompt in _prompts(_with_answer(record)):
                try:
                    if prompt.turns:
                        prompt = replace(prompt, text=conversation_text(prompt.turns, family, tokenizer, chat_format))
                except RecordError as error:
                    rejected.append(f"{path}, line {number}: {error}")
                else:
                    yield prompt

    def size(self, start: int, end: int) -> int:
        """The number of bytes of records `start` … `end` - 1."""
        return sum(size for *_, size in self.lines[start:end])


def _prompts(record: Record) -> list[SourcePrompt]:
    """Each prompt of a record with an answer; the text of a conversation is empty."""
    prompts = []
    # The same aligner as in training, so that any training file serves as a file of prompts.
    for part in map(common_form_aligner(), split_pairs(record)):
        kind, prompt = part["kind"], part["prompt"]
        if prompt is None:
            problem = "is plain text, without a prompt that a target could answer"
            raise RecordError("text", f"{problem}; remove the field if the record also has a prompt, else the record")
        if isinstance(prompt, str) and kind in CONTINUED_KINDS:
            prompts.append(SourcePrompt(part["id"], [], prompt))
        else:
            turns = as_turns(composed(kind, prompt) if isinstance(prompt, str) else prompt)
            prompts.append(SourcePrompt(part["id"], turns, ""))
    return prompts


def _with_answer(record: Record) -> Record:
    """`record` with an empty answer if it has none, so that it has a kind. The answer is not used.

    Raises RecordError if a record without an answer sets sampling options. Next to an answer they describe that answer.
    """
    record = {name: value for name, value in record.items() if value is not None}
    for name in TURN_KINDS:
        turns = record.get(name)
        if not (isinstance(turns, list) and turns and isinstance(turns[-1], dict)):
            continue
        # A conversation that ends with the user lacks exactly the answer that the target will write.
        role = str(turns[-1].get("role") or turns[-1].get("from"))
        if ROLES.get(role) != "assistant":
            check_sampling(record)
            return {**record, name: [*turns, {"role": "assistant", "content": ""}]}
    for kind in KINDS:
        prompt = record.get(kind.prompt_field or "")
        if prompt is None or (kind.prompt_field == "source" and prompt in ("", *SOURCE_TAGS)):
            continue
        if not any(other.answer_field in record for other in KINDS if other.prompt_field == kind.prompt_field):
            check_sampling(record)
            return {**record, kind.answer_field: [""] * len(prompt) if isinstance(prompt, list) else ""}
    return record


def user_turn_marks(tokenizer: Any) -> tuple[str, str]:
    """The chat template's text before and after a user turn. Raises UserError if there is no such text."""
    if template_text(tokenizer) is None:
        raise UserError("the tokenizer has no chat template, so the target cannot write user turns")
    text = apply_template(tokenizer, [{"role": "user", "content": PLACEHOLDER}])
    # Works for any template that inserts the content unchanged.
    before, placeholder, after = text.partition(PLACEHOLDER)
    if not placeholder or not before or not after:
        raise UserError("the chat template does not mark user turns, so the target cannot write them")
    return before, after


def answered(prompt: SourcePrompt, answer: str, **provenance: Any) -> Record:
    """A training record of a prompt and its answer: `messages`, or `prefix` and `suffix`."""
    if prompt.turns:
        body: Record = {"messages": [*prompt.turns, {"role": "assistant", "content": answer}]}
    else:
        body = {"prefix": prompt.text, "suffix": answer}
    return {**body, "source_id": prompt.source_id, **provenance}


def prompt_key(record: Record) -> bytes:
    """A digest of the prompt of an `answered` record, independent of case and spacing, to find duplicates."""
    turns = [turn["content"] for turn in record["messages"][:-1]] if "messages" in record else [record["prefix"]]
    words = [" ".join(text.casefold().split()) for text in turns]
    return hashlib.blake2b(json.dumps(words).encode(errors="surrogatepass"), digest_size=16).digest()


def loops(tokens: Sequence[int]) -> bool:
    """Whether a text is a repetition loop, as a whole or at its end."""
    for part in (tokens, tokens[-LOOP_TAIL:]):
        grams = _grams(part)
        if len(set(grams)) < LOOP_SHARE * len(grams):  # a loop repeats the same few n-grams
            return True
    return False


def _grams(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    """The n-gram at each place of a text that has one."""
    return list(zip(*(tokens[start:] for start in range(LOOP_NGRAM)), strict=False))


def up_to_last_sentence(text: str) -> str:
    """A text without what follows its last complete line or sentence; empty if it has none."""
    # The number of a list's item ends no sentence.
    ends = [match.end() for match in re.finditer(r"\n|(?<!\n\d)(?<!\n\d\d)[.!?](?=\s)|[。！？]", text)]
    return text[: ends[-1]].strip() if ends else ""


def before_loop(tokens: list[int]) -> list[int]:
    """A looping text up to the end of the last n-gram that occurs in it for the first time."""
    grams = _grams(tokens)
    last_new = next(reversed(dict.fromkeys(grams)))
    return tokens[: grams.index(last_new) + LOOP_NGRAM]
