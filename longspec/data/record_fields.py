"""Fields next to a record's text that change what the target reads or writes. They are used, or refused by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from longspec.data.records import TURN_KINDS, Record, RecordError

SYSTEM_FIELDS = ("system", "system_prompt", "system_message")
"""Names of a record's system turn."""
HISTORY = "history"
"""Field of Alpaca records with earlier (question, answer) pairs."""
SYSTEM_KINDS = (*TURN_KINDS, "instruction", "source", "problem", "prompt")
"""Kinds whose prompt can start with a system turn."""
ANSWER_SWITCHES = ("weight", "loss", "train")
"""Fields of a turn that say whether an answer is to be learned: 1 or true, or else 0 or false."""

_LEAVE_OUT = "leave this record out"
_FOR_ALL = "is a setting of the whole run, chat_template_kwargs; remove it from the records"
_NO_MEDIA = f"is not text; {_LEAVE_OUT}"
_INTO_PROMPT = "would be ignored; write it into the prompt's text"
_REASONING = "would be lost; write it into the answer's text as the target writes it, or remove it"
_REASONING_FIELDS = ("reasoning_content", "reasoning", "thinking", "thought", "reasoning_details", "thinking_blocks")

REFUSED_IN_TURNS: dict[str, str] = {
    **dict.fromkeys(("tool_calls", "function_call"), f"holds a tool call, which has no text; {_LEAVE_OUT}"),
    **dict.fromkeys(_REASONING_FIELDS, _REASONING),
    **dict.fromkeys(("image", "images", "audio", "audios", "video", "videos"), _NO_MEDIA),
    "refusal": f"is not the answer's content; {_LEAVE_OUT}",
    "prefix": "asks to continue this turn, which is not supported; use a record with prefix and suffix",
}
"""Fields of a turn that change its text, with the problem to report."""
REFUSED_IN_CONVERSATIONS: dict[str, str] = {
    "reasoning_content": _REASONING,
    **dict.fromkeys(("tools", "functions"), "would be ignored; write the definitions into the system turn's text"),
    "documents": _INTO_PROMPT,
    **dict.fromkeys(("chat_template_kwargs", "chat_template", "enable_thinking", "reasoning_effort"), _FOR_ALL),
    "continue_final_message": "is not supported; use a record with prefix and suffix",
    **dict.fromkeys(("image", "images", "audio", "audios", "video", "videos"), _NO_MEDIA),
}
"""Fields of a record with a prompt or turns that change what the target reads."""
REFUSED_NEXT_TO_PROMPTS: dict[str, str] = {
    **dict.fromkeys(("context", "input", "chat_history"), _INTO_PROMPT),
    "suffix": "is only read next to a prefix; remove it",
    **dict.fromkeys(_REASONING_FIELDS, _REASONING),
}
"""The same for kinds with a prompt of text. Conversations often have such fields as metadata."""
SAMPLING_FIELDS = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "epsilon_cutoff", "do_sample", "seed", "n", "best_of"),
    *("max_tokens", "max_new_tokens", "max_completion_tokens", "max_length", "min_tokens", "min_new_tokens"),
    *("min_length", "stop", "stop_sequences", "stop_strings", "stop_token_ids", "eos_token_id", "ignore_eos"),
    *("logit_bias", "repetition_penalty", "presence_penalty", "frequency_penalty", "no_repeat_ngram_size"),
    *("bad_words", "bad_words_ids", "suppress_tokens", "num_beams", "response_format", "tool_choice"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "structured_outputs"),
    *("sampling_params", "generation_config", "extra_body"),
)
"""Options of an answer that requests of other programs have."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "best_of": (1,),
    "num_beams": (1,),
    "top_p": (1,),
    "typical_p": (1,),
    "repetition_penalty": (1,),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
}
"""Values that change nothing. So do null, false, "" and empty lists and objects, and 0 for fields not listed below."""
ANY_VALUE_COUNTS = ("temperature", "seed", "enable_thinking", "do_sample", "eos_token_id", "top_k")
"""Fields in which false and 0 are values of their own."""


def is_set(name: str, value: Any) -> bool:
    """Whether a field has a value that changes something."""
    if name in ANY_VALUE_COUNTS:
        return value is not None
    # Some data sets store lists of tools as JSON text.
    return bool(value) and value not in NEUTRAL.get(name, ()) and value not in ("[]", "{}", "null")


def check_fields(fields: Mapping[str, Any], refused: Mapping[str, str], where: str = "") -> None:
    """Raise RecordError for the first of the `refused` fields that is set. where: prefix of the field's name."""
    for name, problem in refused.items():
        if is_set(name, fields.get(name)):
            raise RecordError(f"{where}{name}", problem)


def check_record(record: Record, kind: str, has_prompt: bool) -> None:
    """Raise RecordError for a field that changes the meaning of a record of this kind and is not used.

    has_prompt: whether the kind has a prompt or turns; plain text has neither.
    """
    if has_prompt:
        check_fields(record, REFUSED_IN_CONVERSATIONS)
    if has_prompt and kind not in TURN_KINDS:
        used = {"instruction": "input", "prefix": "suffix"}.get(kind)
        check_fields(record, {name: text for name, text in REFUSED_NEXT_TO_PROMPTS.items() if name != used})
    if kind not in SYSTEM_KINDS:
        check_fields(record, dict.fromkeys(SYSTEM_FIELDS, f"is not supported in a record of kind {kind}; remove it"))
    if kind != "instruction":
        check_fields(record, {HISTORY: f"is not supported in a record of kind {kind}; use `messages`"})
    weight = record.get("weight")
    if isinstance(weight, int | float) and weight != 1:
        raise RecordError("weight", f"is {weight}; records cannot be weighted; remove it, or {_LEAVE_OUT}")
    # Unpaired preference data, whose answers may be bad ones.
    if has_prompt and record.get("label") is False:
        raise RecordError("label", f"is false, so the answer is a bad one; {_LEAVE_OUT}")


def check_sampling(record: Record) -> None:
    """Raise RecordError if a record that asks for an answer sets an option of it."""
    check_fields(
        record,
        dict.fromkeys(SAMPLING_FIELDS, "is not read from records; the options of the command apply to all; remove it"),
    )


def is_learned(turn: Mapping[str, Any], field: str) -> bool:
    """Whether an answer may be learned, by ANSWER_SWITCHES. Raises RecordError for another value than 0 and 1."""
    switches = {name: turn[name] for name in ANSWER_SWITCHES if turn.get(name) is not None}
    for name, value in switches.items():
        if value not in (0, 1):
            raise RecordError(f"{field}.{name}", f"is {value!r}; only 0 and 1 are supported; {_LEAVE_OUT}")
    return all(switches.values())


def system_field(record: Record) -> str | None:
    """The name of the record's system turn, if it has one. Raises RecordError if it has several."""
    names = [name for name in SYSTEM_FIELDS if is_set(name, record.get(name))]
    if len(names) > 1:
        raise RecordError(names[1], f"repeats '{names[0]}'; give one of them")
    return names[0] if names else None
