"""Aligners: functions record -> record that bring every kind of record to one form.

Each public function here makes an aligner, so a Hydra list of `_target_`s composes them. The last one of a list has to
be `common_form_aligner`: its records {id, kind, prompt, answer} are what templates read. Where each (article, abstract)
pair of a record is to be a sample of its own, the lists are split right before it; earlier aligners see the lists.
"""

from collections.abc import Callable
from functools import partial
from typing import TypedDict

from longspec.data.records import (
    TURN_KINDS,
    WHERE,
    Record,
    RecordError,
    is_list_of_pairs,
    record_kind,
    split_pairs,
    text_of,
)

ROLES = {
    **{role: role for role in ("system", "user", "assistant", "tool")},
    "developer": "system",
    "human": "user",
    "gpt": "assistant",
}
"""Role names in records (OpenAI's, and ShareGPT's `from`) -> the roles that chat templates know."""

Aligner = Callable[[Record], Record]


class Turn(TypedDict):
    role: str
    content: str


class Sample(TypedDict):
    """The common form: plain text has no prompt, a conversation's prompt is all turns before the last answer.

    A record of several (article, abstract) pairs is a conversation, too: article by article, each with its abstract.
    """

    id: str
    kind: str
    prompt: str | list[Turn] | None
    answer: str


def add_id_aligner(field: str = "id") -> Aligner:
    """Give a record without `field` the name "file:line"; an id that is there stays, as a string."""
    return partial(_add_id, field=field)


def rename_fields_aligner(names: dict[str, str]) -> Aligner:
    """Rename fields, old name -> new name, so that records with other names fit one of the known kinds."""
    return partial(_rename_fields, names=dict(names))


def common_form_aligner() -> Aligner:
    """Any kind of record to {id, kind, prompt, answer}; ill-typed or missing fields raise RecordError."""
    return _common_form


def _add_id(record: Record, field: str) -> Record:
    given = record.get(field)
    return {**record, "id": record[WHERE] if given is None else str(given)}


def _rename_fields(record: Record, names: dict[str, str]) -> Record:
    return {names.get(name, name): value for name, value in record.items()}


def _common_form(record: Record) -> Record:
    kind = record_kind(record)
    prompt: str | list[Turn] | None = None
    if kind.name in TURN_KINDS:
        prompt, answer = _last_answer(_turns(record[kind.answer_field], kind.name), kind.name)
    elif is_list_of_pairs(record):
        prompt, answer = _pairs(record)
    else:
        answer = text_of(record[kind.answer_field], kind.answer_field)
        if kind.prompt_field is not None:
            prompt = text_of(record[kind.prompt_field], kind.prompt_field)
        if kind.name == "instruction" and record.get("input"):
            prompt = f"{prompt}\n\n{text_of(record['input'], 'input')}"
    return {
        "id": str(record["id"] if "id" in record else record[WHERE]),
        "kind": kind.name,
        "prompt": prompt,
        "answer": answer,
    }


def _pairs(record: Record) -> tuple[list[Turn], str]:
    """Turns up to the last article, and its abstract. Pairs with an empty abstract are left out."""
    pairs = [
        (text_of(pair["article"], f"article[{number}]"), text_of(pair["abstract"], f"abstract[{number}]"))
        for number, pair in enumerate(split_pairs(record))
    ]
    kept = [pair for pair in pairs if pair[1].strip()] or pairs[:1]
    turns: list[Turn] = []
    for article, abstract in kept:
        turns += [{"role": "user", "content": article}, {"role": "assistant", "content": abstract}]
    return turns[:-1], turns[-1]["content"]


def _turns(value: object, field: str) -> list[Turn]:
    if not isinstance(value, list):
        raise RecordError(field, f"must be a list of turns, not {type(value).__name__}")
    return [_turn(turn, f"{field}[{number}]") for number, turn in enumerate(value)]


def _turn(turn: object, field: str) -> Turn:
    """One turn, from {role, content} or ShareGPT's {from, value}. Raises RecordError for what has no text."""
    if not isinstance(turn, dict):
        raise RecordError(field, f"must be an object with role and content, not {type(turn).__name__}")
    role_key, content_key = ("from", "value") if "from" in turn and "role" not in turn else ("role", "content")
    given = text_of(turn.get(role_key), f"{field}.{role_key}")
    if given not in ROLES:
        raise RecordError(f"{field}.{role_key}", f"is '{given}'; the roles that can be read are {', '.join(ROLES)}")
    if calls := next((key for key in ("tool_calls", "function_call") if turn.get(key)), None):
        raise RecordError(f"{field}.{calls}", "holds a tool call, which has no text; leave this record out")
    return {"role": ROLES[given], "content": _content(turn.get(content_key), f"{field}.{content_key}")}


def _content(content: object, field: str) -> str:
    """A turn's text: a string, or OpenAI's list of text parts, which are joined without anything between them."""
    if not isinstance(content, list):
        return text_of(content, field)
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RecordError(f"{field}[{number}]", f"is of type '{kind}'; only parts of type 'text' can be read")
        texts.append(text_of(part.get("text"), f"{field}[{number}].text"))
    return "".join(texts)


def _last_answer(turns: list[Turn], field: str) -> tuple[list[Turn], str]:
    answers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not answers:
        raise RecordError(field, "has no turn with role 'assistant'")
    return turns[: answers[-1]], turns[answers[-1]]["content"]


DEFAULT_ALIGNERS = (add_id_aligner(), common_form_aligner())
