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

_REASONING = (
    "reasoning reasoning_content reasoning_text reasoning_details reasoning_steps reasoning_trace "
    "think thinking thinking_blocks thought thoughts cot chain_of_thought rationale scratchpad"
)
_MEDIA = "image images image_url image_urls image_path audio audios audio_url video videos video_url attachments"
REFUSED_IN_TURNS = _names(
    "tool_calls tool_call tool_use function_call function_calls refusal prefix partial prefill",
    "mask masked train_detail",
    _REASONING,
    _MEDIA,
)
"""Plain names, as all below. In a turn."""
REFUSED_IN_CONVERSATIONS = _names(
    "tools functions available_tools tool_definitions tool_schemas function_definitions apis documents instructions",
    "chat_template_kwargs template_kwargs chat_template enable_thinking thinking_budget reasoning_effort",
    "continue_final_message prefill response_prefix assistant_prefix assistant_prefill mask rejected",
    _REASONING,
    _MEDIA,
)
"""In a record with a prompt or turns."""
REFUSED_NEXT_TO_PROMPTS = _names(
    "context input chat_history conversation_history previous_messages query question hint hints examples",
    "demonstrations few_shot few_shot_examples background passage passages knowledge suffix middle",
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


def check_fields(
    fields: Mapping[str, Any],
    refused: Collection[str],
    where: str = "",
    text: str = "",
    problem: str = "would be ignored; write it into the text, remove it, or leave this record out",
) -> None:
    """Raise RecordError for the first field that is refused and set.

    refused: plain names; where: prefix of the name. text: the record's or turn's own; a field that repeats parts of it
    loses nothing.
    """
    for name, value in fields.items():
        if plain_name(name) in refused and is_set(plain_name(name), value):
            parts = value if isinstance(value, list) and value else [value]
            if not all(isinstance(part, str) and part.strip() != "" and part.strip() in text for part in parts):
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
    refused = {HISTORY, *REFUSED_WEIGHTS}
    has_prompt = kind.prompt_field is not None or kind.name in TURN_KINDS
    if has_prompt:
        refused.update(REFUSED_IN_CONVERSATIONS)
    if kind.prompt_field is not None:
        refused.update(REFUSED_NEXT_TO_PROMPTS)
    if kind.name not in SYSTEM_KINDS:
        refused.update(SYSTEM_FIELDS)
    refused.difference_update({"instruction": ("input", HISTORY), "prefix": ("suffix",)}.get(kind.name, ()))
    parts = [record.get(name) for name in (kind.prompt_field, kind.answer_field) if name is not None]
    check_fields(record, refused, text="\n".join(part for part in parts if isinstance(part, str)))
    weight = record.get("weight")
    if isinstance(weight, int | float) and weight != 1:
        raise RecordError("weight", f"is {weight}; records cannot be weighted")
    # Unpaired preference data, whose answers may be bad ones.
    if has_prompt and record.get("label") is False:
        raise RecordError("label", "is false, so the answer is a bad one; leave this record out")


def unread_note(names: Collection[str]) -> str:
    """A line that names fields from `unread_fields`."""
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"fields of the records that are not read: {', '.join(sorted(names)[:MOST_NAMES])}{more}"


def check_sampling(record: Record) -> None:
    """Raise RecordError if a record that asks for an answer sets an option of it."""
    check_fields(
        record, SAMPLING_FIELDS, problem="is not read from records; the options of the command apply to all; remove it"
    )


def is_learned(turn: Mapping[str, Any], field: str) -> bool:
    """Whether an answer may be learned, by ANSWER_SWITCHES. Raises RecordError for another value than 0 and 1."""
    switches = {
        name: value for name, value in turn.items() if value is not None and plain_name(name) in ANSWER_SWITCHES
    }
    for name, value in switches.items():
        if value not in (0, 1):
            raise RecordError(f"{field}.{name}", f"is {value!r}; only 0 and 1 are supported")
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
