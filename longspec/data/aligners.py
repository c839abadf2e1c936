"""Aligners: functions record -> record that convert every kind of record to the common form.

Each public function here returns an aligner, so that a Hydra list of `_target_`s composes them. The last aligner of a
list must be `common_form_aligner`. Templates read its records {id, kind, prompt, answer}. If each (article, abstract)
pair of a record becomes a sample of its own, the lists are split right before the last aligner; earlier ones see the
lists.
"""

from collections.abc import Callable
from functools import partial
from typing import NotRequired, TypedDict

from longspec.data.record_fields import (
    HISTORY,
    REFUSED_IN_TURNS,
    check_fields,
    check_record,
    is_cut,
    is_learned,
    system_field,
)
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
"""Role names in records (OpenAI's, and ShareGPT's `from`) -> roles of chat templates."""

Aligner = Callable[[Record], Record]


class Turn(TypedDict):
    """One turn of a conversation. The role is one of the values of ROLES."""

    role: str
    content: str
    name: NotRequired[str]
    """Name of the speaker or tool, which some chat templates write."""


class AlignedRecord(TypedDict):
    """A record in the common form.

    Plain text has no prompt. The prompt of a conversation is all turns before its last answer. A record with several
    (article, abstract) pairs is a conversation that alternates articles and abstracts.
    """

    id: str
    kind: str
    prompt: str | list[Turn] | None
    answer: str
    cut: NotRequired[bool]
    """Whether the answer ends before its EOS."""


def add_id_aligner(field: str = "id") -> Aligner:
    """Set the id to the value of `field` as a string, or to "file:line" if that is missing."""
    return partial(_add_id, field=field)


def rename_fields_aligner(names: dict[str, str]) -> Aligner:
    """Rename fields, old name -> new name, so that the record fits one of the known kinds."""
    return partial(_rename_fields, names=dict(names))


def common_form_aligner() -> Aligner:
    """Convert any kind of record to an AlignedRecord. Raises RecordError for a missing or ill-typed field."""
    return _common_form


def _add_id(record: Record, field: str) -> Record:
    value = record.get(field)
    return {**record, "id": record[WHERE] if value is None else str(value)}


def _rename_fields(record: Record, names: dict[str, str]) -> Record:
    return {names.get(name, name): value for name, value in record.items()}


def _common_form(record: Record) -> Record:
    kind = record_kind(record)
    check_record(record, kind)
    prompt: str | list[Turn] | None = None
    cut = is_cut(record)
    if kind.name in TURN_KINDS:
        prompt, answer, cut_turn = _last_answer(record[kind.answer_field], kind.name)
        cut |= cut_turn
    elif is_list_of_pairs(record):
        prompt, answer = _pairs(record)
    else:
        answer = text_of(record[kind.answer_field], kind.answer_field)
        if kind.prompt_field is not None:
            prompt = text_of(record[kind.prompt_field], kind.prompt_field)
        # Alpaca: `input` is the text that the instruction refers to, and is often empty.
        if kind.name == "instruction" and record.get("input"):
            added = text_of(record["input"], "input")
            prompt = f"{prompt}\n\n{added}" if prompt else added
    if prompt is not None and (opening := _opening(record)):
        prompt = _after_opening(opening, prompt)
    name = str(record["id"] if "id" in record else record[WHERE])
    # A name only, so a character that UTF-8 cannot encode is written as its escape.
    name = name.encode(errors="backslashreplace").decode()
    aligned: Record = {"id": name, "kind": kind.name, "prompt": prompt, "answer": answer}
    return aligned | ({"cut": True} if cut else {})


def _exchange(question: str, answer: str) -> list[Turn]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def as_turns(prompt: str | list[Turn]) -> list[Turn]:
    """A prompt as turns; text becomes a user turn."""
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _pairs(record: Record) -> tuple[list[Turn], str]:
    """The turns up to the last article, and its abstract. Pairs with an empty abstract are skipped."""
    pairs = [
        [text_of(pair[name], f"{name}[{number}]") for name in ("article", "abstract")]
        for number, pair in enumerate(split_pairs(record))
    ]
    # A record without any abstract keeps one pair, and its empty answer is counted later.
    kept = [pair for pair in pairs if pair[1].strip()] or pairs[:1]
    turns = [turn for pair in kept for turn in _exchange(*pair)]
    return turns[:-1], turns[-1]["content"]


def _turn(turn: object, field: str) -> Turn:
    """One turn, from {role, content} or ShareGPT's {from, value}. Raises RecordError if it has no text."""
    if not isinstance(turn, dict):
        raise RecordError(field, f"must be an object with role and content, not {type(turn).__name__}")
    # Merged data sets have null for the other pair.
    is_sharegpt = turn.get("from") is not None and turn.get("role") is None
    role_key, content_key = ("from", "value") if is_sharegpt else ("role", "content")
    if (role := text_of(turn.get(role_key), f"{field}.{role_key}")) not in ROLES:
        raise RecordError(f"{field}.{role_key}", f"is '{role}'; use one of {', '.join(ROLES)}")
    content = turn.get(content_key)
    check_fields(turn, REFUSED_IN_TURNS, f"{field}.", content if isinstance(content, str) else "")
    read: Turn = {"role": ROLES[role], "content": _content(content, f"{field}.{content_key}")}
    if turn.get("name"):
        read["name"] = text_of(turn["name"], f"{field}.name")
    return read


def _content(content: object, field: str) -> str:
    """A turn's text: a string, or the concatenation of OpenAI's list of text parts."""
    if not isinstance(content, list):
        return text_of(content, field)
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else type(part).__name__
            raise RecordError(f"{field}[{number}]", f"is of type '{kind}'; only parts of type 'text' are supported")
        texts.append(text_of(part.get("text"), f"{field}[{number}].text"))
    return "".join(texts)


def _last_answer(value: object, field: str) -> tuple[list[Turn], str, bool]:
    """The turns before the last answer that may be learned, that answer, and whether it was cut."""
    if not isinstance(value, list):
        raise RecordError(field, f"must be a list of turns, not {type(value).__name__}")
    turns = [_turn(turn, f"{field}[{number}]") for number, turn in enumerate(value)]
    # A draft is trained on answers; turns after the last one belong to no answer.
    answers = [number for number, turn in enumerate(turns) if turn["role"] == "assistant"]
    if not answers:
        raise RecordError(field, "has no turn with role 'assistant'")
    learned = [number for number in answers if is_learned(value[number], f"{field}[{number}]")]
    if not learned:
        raise RecordError(field, "has no answer to learn, all have weight 0; leave this record out")
    last = learned[-1]
    return turns[:last], turns[last]["content"], is_cut(value[last])


def _opening(record: Record) -> list[Turn]:
    """The turns of a record's system field and of its history of (question, answer) pairs."""
    name = system_field(record)
    opening: list[Turn] = [] if name is None else [{"role": "system", "content": text_of(record[name], name)}]
    history = record.get(HISTORY) or []
    if not isinstance(history, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in history):
        raise RecordError(HISTORY, "must be a list of [question, answer] pairs")
    for number, pair in enumerate(history):
        opening += _exchange(*(text_of(text, f"{HISTORY}[{number}]") for text in pair))
    return opening


def _after_opening(opening: list[Turn], prompt: str | list[Turn]) -> list[Turn]:
    """`prompt` as turns, after those of `opening`. Some data sets repeat the first turn in a field of the record."""
    turns = as_turns(prompt)
    if turns[:1] == opening:
        return turns
    if opening[0]["role"] == "system" and turns and turns[0]["role"] == "system":
        raise RecordError("system", "differs from the system turn; give one of them")
    return [*opening, *turns]


DEFAULT_ALIGNERS = (add_id_aligner(), common_form_aligner())
