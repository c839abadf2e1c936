"""Aligners: functions record -> record that bring every kind of record to one form.

Each public function here makes an aligner, so a Hydra list of `_target_`s composes them. The last one of a list has to
be `common_form_aligner`: its records {id, kind, prompt, answer} are what templates read. Lists of articles are split
into pairs right before it, so the aligners in front of it still see the lists.
"""

from collections.abc import Callable
from functools import partial
from typing import TypedDict

from longspec.data.records import TURN_KINDS, WHERE, Record, RecordError, record_kind, text_of

Aligner = Callable[[Record], Record]


class Turn(TypedDict):
    role: str
    content: str


class Sample(TypedDict):
    """The common form: plain text has no prompt, a conversation's prompt is all turns before the last answer."""

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
    else:
        answer = text_of(record[kind.answer_field], kind.answer_field)
        if kind.prompt_field is not None:
            prompt = text_of(record[kind.prompt_field], kind.prompt_field)
    return {
        "id": str(record["id"] if "id" in record else record[WHERE]),
        "kind": kind.name,
        "prompt": prompt,
        "answer": answer,
    }


def _turns(value: object, field: str) -> list[Turn]:
    if not isinstance(value, list):
        raise RecordError(field, f"must be a list of turns, not {type(value).__name__}")
    turns: list[Turn] = []
    for number, turn in enumerate(value):
        if not isinstance(turn, dict):
            raise RecordError(
                f"{field}[{number}]", f"must be an object with role and content, not {type(turn).__name__}"
            )
        role, content = (text_of(turn.get(key), f"{field}[{number}].{key}") for key in ("role", "content"))
        turns.append({"role": role, "content": content})
    return turns


def _last_answer(turns: list[Turn], field: str) -> tuple[list[Turn], str]:
    answers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not answers:
        raise RecordError(field, "has no turn with role 'assistant'")
    return turns[: answers[-1]], turns[answers[-1]]["content"]


DEFAULT_ALIGNERS = (add_id_aligner(), common_form_aligner())
