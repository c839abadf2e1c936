"""Fields next to a record's text that change what the target reads or writes. They are used, or refused by name."""

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

from longspec.data.records import TURN_KINDS, WHERE, Kind, Record, RecordError, record_kind


@cache
def plain_name(name: str) -> str:
    """A field's name without case and separators: data sets write systemPrompt, system_prompt and system-prompt."""
    return name.lower().replace("_", "").replace("-", "").replace(" ", "")


def _names(*lists: str) -> tuple[str, ...]:
    return tuple(plain_name(name) for text in lists for name in text.split())


SYSTEM_FIELDS = _names(
    "system system_prompt system_message system_instruction system_instructions sys sys_prompt",
    "developer_message developer_prompt meta_instruction preamble",
)
"""Plain names of a record's system turn."""
HISTORY = "history"
"""Field of Alpaca records with earlier (question, answer) pairs."""
SYSTEM_KINDS = (*TURN_KINDS, "instruction", "source", "problem", "prompt")
"""Kinds whose prompt can start with a system turn."""
ANSWER_SWITCHES = _names("weight loss train loss_weight trainable train_on_turn learn loss_mask")
"""Plain names of a turn's fields that say whether an answer is to be learned: 1 or true, or else 0 or false."""

_LEAVE_OUT = "leave this record out"
_FOR_ALL = "is a setting of the whole run, chat_template_kwargs; remove it from the records"
_NO_MEDIA = f"is not text; {_LEAVE_OUT}"
_INTO_PROMPT = "would be ignored; write it into the prompt's text"
_REASONING = "would be lost; write it into the answer's text as the target writes it, or remove it"
_TOOL_CALL = f"holds a tool call, which has no text; {_LEAVE_OUT}"
_TOOLS = "would be ignored; write the definitions into the system turn's text"
_PREFILL = "asks to continue an answer, which is not supported; use a record with prefix and suffix"
_UNWEIGHTED = f"records cannot be weighted; remove it, or {_LEAVE_OUT}"
_REASONING_FIELDS = (
    "reasoning reasoning_content reasoning_text reasoning_details reasoning_steps reasoning_trace "
    "think thinking thinking_blocks thought thoughts cot chain_of_thought rationale scratchpad"
)
_MEDIA_FIELDS = "image images image_url image_urls image_path audio audios audio_url video videos video_url attachments"


def _refused(problems: Mapping[str, str]) -> dict[str, str]:
    """Fields that change the text, by plain name, with the problem to report. problems: by names, as for `_names`."""
    return {name: problem for names, problem in problems.items() for name in _names(names)}


REFUSED_IN_TURNS = _refused(
    {
        "tool_calls tool_call tool_use function_call function_calls": _TOOL_CALL,
        _REASONING_FIELDS: _REASONING,
        _MEDIA_FIELDS: _NO_MEDIA,
        "refusal": f"is not the answer's content; {_LEAVE_OUT}",
        "prefix partial prefill": _PREFILL,
        "mask masked train_detail": "may hide a part of the answer from training; use weight, 0 or 1",
    }
)
"""In a turn."""
REFUSED_IN_CONVERSATIONS = _refused(
    {
        _REASONING_FIELDS: _REASONING,
        "tools functions available_tools tool_definitions tool_schemas function_definitions apis": _TOOLS,
        "documents instructions": _INTO_PROMPT,
        "chat_template_kwargs template_kwargs chat_template enable_thinking thinking_budget reasoning_effort": _FOR_ALL,
        "continue_final_message prefill response_prefix assistant_prefix assistant_prefill": _PREFILL,
        _MEDIA_FIELDS: _NO_MEDIA,
        "mask": f"may hide a part of the text from training; remove it, or {_LEAVE_OUT}",
        "rejected": f"belongs to preference data, whose pairs are not read; {_LEAVE_OUT}",
    }
)
"""In a record with a prompt or turns."""
REFUSED_NEXT_TO_PROMPTS = _refused(
    {
        "context input chat_history conversation_history previous_messages query question hint hints examples "
        "demonstrations few_shot few_shot_examples background passage passages knowledge": _INTO_PROMPT,
        "suffix": "is only read next to a prefix; remove it",
        "middle": "is only read as part of prefix or suffix; remove it",
    }
)
"""In a record with a prompt of text. Conversations often have such fields as metadata."""
REFUSED_WEIGHTS = _names("sample_weight loss_weight weights loss_mask train trainable")
"""In a record of any kind, unless they are 1 or true."""
SAMPLING_FIELDS = _names(
    "temperature top_p top_k top_a min_p typical_p epsilon_cutoff eta_cutoff do_sample seed n best_of",
    "max_tokens max_new_tokens max_completion_tokens max_output_tokens max_gen_len max_tokens_to_sample max_length",
    "n_predict num_predict min_tokens min_new_tokens min_length length_penalty",
    "stop stop_sequences stop_strings stop_words stop_token_ids eos_token_id ignore_eos",
    "logit_bias repetition_penalty repeat_penalty presence_penalty frequency_penalty no_repeat_ngram_size mirostat",
    "bad_words bad_words_ids suppress_tokens num_beams response_format json_schema grammar tool_choice",
    "guided_json guided_regex guided_choice guided_grammar structured_outputs",
    "sampling_params sampling_parameters generation_config generation_kwargs parameters options extra_body echo",
)
"""Plain names of options of an answer that requests of other programs have."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(
        _names("n best_of num_beams top_p typical_p repetition_penalty repeat_penalty length_penalty"), (1,)
    ),
    **dict.fromkeys(REFUSED_WEIGHTS, (1,)),
    "toolchoice": ("none", "auto"),
    "responseformat": ({"type": "text"},),
}
"""Values that change nothing. So do null, false, "" and empty lists and objects, and 0 for fields not listed below."""
ANY_VALUE_COUNTS = _names(
    "temperature seed enable_thinking thinking_budget do_sample eos_token_id top_k", *REFUSED_WEIGHTS
)
"""Fields in which false and 0 are values of their own."""
MOST_NAMES = 20
"""Most fields that a note names."""
CUT_ANSWERS: dict[str, tuple[Any, ...]] = {
    "finished": (False,),
    **dict.fromkeys(_names("finish_reason stop_reason"), ("length", "max_tokens", "MAX_TOKENS")),
    **dict.fromkeys(_names("truncated is_truncated"), (True,)),
}
"""Plain names of fields that say whether an answer or text is complete, with the values of one that was cut."""
USED_FIELDS = frozenset((*SYSTEM_FIELDS, *CUT_ANSWERS, *_names("id source weight source_id temperature new_tokens")))
"""Plain names of fields that are read next to a record's text, and of the facts that `regenerate` writes there."""
USED_IN_TURNS = frozenset((*ANSWER_SWITCHES, *CUT_ANSWERS, *_names("role from content value name tool_call_id")))
"""Plain names of the fields of a turn that are read, and the number of a tool call, which its text does not show."""


def is_set(name: str, value: Any) -> bool:
    """Whether a field has a value that changes something. name: plain."""
    if value is None or value in NEUTRAL.get(name, ()):
        return False
    if name in ("options", "parameters") and not isinstance(value, dict):
        return False  # the choices of a question, say
    # Some data sets store lists of tools as JSON text.
    return name in ANY_VALUE_COUNTS or (bool(value) and value not in ("[]", "{}", "null"))


def check_fields(fields: Mapping[str, Any], refused: Mapping[str, str], where: str = "", text: str = "") -> None:
    """Raise RecordError for the first field that is refused and set.

    refused: by plain name; where: prefix of the name. text: the record's or turn's own; a field that repeats parts of
    it loses nothing.
    """
    for name, value in fields.items():
        problem = refused.get(plain_name(name))
        parts = value if isinstance(value, list) and value else [value]
        is_repeated = all(isinstance(part, str) and part.strip() != "" and part.strip() in text for part in parts)
        if problem is not None and is_set(plain_name(name), value) and not is_repeated:
            raise RecordError(f"{where}{name}", problem)


def unread_fields(record: Record) -> set[str]:
    """The names of the fields of a record that nothing reads, those of turns as TURNS[].NAME. Raises RecordError."""
    kind = record_kind(record)
    used = USED_FIELDS | {kind.answer_field, kind.prompt_field}
    used |= {"instruction": {"input", HISTORY}}.get(kind.name, set())
    names = {name for name, value in record.items() if name != WHERE and value is not None}
    unread = {name for name in names if name not in used and plain_name(name) not in used}
    turns = record[kind.answer_field] if kind.name in TURN_KINDS else ()
    for turn in turns if isinstance(turns, list) else ():
        given = {name for name, value in turn.items() if value is not None} if isinstance(turn, dict) else set()
        unread |= {f"{kind.name}[].{name}" for name in given if plain_name(name) not in USED_IN_TURNS}
    return unread


def check_record(record: Record, kind: Kind) -> None:
    """Raise RecordError for a field that changes the meaning of a record of this kind and is not used."""
    has_prompt = kind.prompt_field is not None or kind.name in TURN_KINDS
    parts = [record.get(name) for name in (kind.prompt_field, kind.answer_field) if name is not None]
    text = "\n".join(part for part in parts if isinstance(part, str))
    if has_prompt:
        check_fields(record, REFUSED_IN_CONVERSATIONS, text=text)
    if kind.prompt_field is not None:
        used = {"instruction": "input", "prefix": "suffix"}.get(kind.name)
        refused = {name: problem for name, problem in REFUSED_NEXT_TO_PROMPTS.items() if name != used}
        check_fields(record, refused, text=text)
    unsupported = f"is not supported in a record of kind {kind.name}"
    if kind.name not in SYSTEM_KINDS:
        check_fields(record, dict.fromkeys(SYSTEM_FIELDS, f"{unsupported}; remove it"))
    if kind.name != "instruction":
        check_fields(record, {HISTORY: f"{unsupported}; use `messages`"})
    check_fields(record, dict.fromkeys(REFUSED_WEIGHTS, _UNWEIGHTED))
    weight = record.get("weight")
    if isinstance(weight, int | float) and weight != 1:
        raise RecordError("weight", f"is {weight}; {_UNWEIGHTED}")
    # Unpaired preference data, whose answers may be bad ones.
    if has_prompt and record.get("label") is False:
        raise RecordError("label", f"is false, so the answer is a bad one; {_LEAVE_OUT}")


def unread_note(names: Collection[str]) -> str:
    """A line that names fields from `unread_fields`."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"fields of the records that are not read: {', '.join(sorted(names)[:MOST_NAMES])}{more}"


def check_sampling(record: Record) -> None:
    """Raise RecordError if a record that asks for an answer sets an option of it."""
    check_fields(
        record,
        dict.fromkeys(SAMPLING_FIELDS, "is not read from records; the options of the command apply to all; remove it"),
    )


def is_learned(turn: Mapping[str, Any], field: str) -> bool:
    """Whether an answer may be learned, by ANSWER_SWITCHES. Raises RecordError for another value than 0 and 1."""
    switches = {
        name: value for name, value in turn.items() if value is not None and plain_name(name) in ANSWER_SWITCHES
    }
    for name, value in switches.items():
        if value not in (0, 1):
            raise RecordError(f"{field}.{name}", f"is {value!r}; only 0 and 1 are supported; {_LEAVE_OUT}")
    return all(switches.values())


def is_cut(fields: Mapping[str, Any]) -> bool:
    """Whether the fields of a record or turn say that its text was cut off, so that no EOS belongs after it."""
    return any(value in CUT_ANSWERS.get(plain_name(name), ()) for name, value in fields.items())


def system_field(record: Record) -> str | None:
    """The name of the record's system turn, if it has one. Raises RecordError if it has several."""
    names = [name for name, value in record.items() if plain_name(name) in SYSTEM_FIELDS and is_set("system", value)]
    if len(names) > 1:
        raise RecordError(names[1], f"repeats '{names[0]}'; give one of them")
    return names[0] if names else None
