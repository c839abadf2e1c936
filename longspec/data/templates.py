"""Prompt templates and chat formats: aligned records as text, and text as token ids."""

from collections.abc import Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from longspec.data.aligners import AlignedRecord, Turn, as_turns
from longspec.data.records import KINDS, TURN_KINDS, RecordError
from longspec.errors import UserError, first_line

CHAT_FORMATS = ("published", "tokenizer", "plain")
"""The format of the published drafts, the tokenizer's chat template, and plain text without role markers."""
PLAIN_BREAK = "\n\n"
"""Separator of turns in the format plain. The one before an answer belongs to the answer."""
PUBLISHED_ROLES = ("system", "user", "assistant")
SYSTEM_TURN: Turn = {"role": "system", "content": "You are a helpful assistant"}
"""First turn in the published format, unless the conversation has its own."""
TURN_FORMATS = {"llama": ("<s>", "</s>"), "qwen2": ("<|im_start|>", "<|im_end|>")}
"""The published format by model family: the text before a turn's role and after its content."""
COMPOSITIONS = {
    "article": "Below is a scientific article. Write the abstract that belongs to it.\n\nArticle:\n{prompt}\n\n"
    "Now write the abstract.",
    "report": "Below is a report from a public body. Sum up in about a page what it finds.\n\nReport:\n{prompt}\n\n"
    "Now write the summary.",
    "document": "Below are one or more news stories on one event. Sum them up in a single text.\n\nNews:\n{prompt}\n\n"
    "Now write the summary.",
    "transcript": "Below is the transcript of a meeting. Sum up what was said and decided.\n\nTranscript:\n{prompt}\n\n"
    "Now write the summary.",
}
"""The text of a user turn around a prompt, by kind."""
LEAD_IN = "Summary:"
"""The word that opens answers to COMPOSITIONS in the published format."""
CONTINUED_KINDS = ("prefix",)
"""Kinds whose answer continues the prompt directly, without a chat format."""
TEMPLATE_KINDS = tuple(
    dict.fromkeys(kind.name for kind in KINDS if kind.prompt_field and kind.name not in CONTINUED_KINDS)
)
"""Kinds of records whose prompt is inserted into a template."""
THINK = "<think>"
"""Opens the reasoning in an answer. The chat templates of some targets write it before each answer."""
MARK = "\0"
"""Stands for a field's text while a template is checked."""


def check_template(text: object, fields: Sequence[str], where: str) -> str:
    """`text`, if it is a format string with one or more of `fields`. Raises UserError that starts with `where`."""
    braced = " or ".join(f"{{{name}}}" for name in fields)
    try:
        filled = text.format(**dict.fromkeys(fields, MARK)) if isinstance(text, str) else ""
    except (LookupError, ValueError, AttributeError, TypeError) as error:
        reason = f"{type(error).__name__}: {error}"
        raise UserError(f"{where}: not a template ({reason}); use {braced} and double other braces") from error
    # Doubled braces are no field.
    if not isinstance(text, str) or MARK not in filled:
        raise UserError(f"{where}: must be text with {braced}")
    return text


def check_templates(templates: Mapping[str, object], where: str) -> dict[str, str]:
    """`templates`, if it maps TEMPLATE_KINDS to text with {prompt}. Raises UserError that starts with `where`."""
    for kind in templates:
        if kind not in TEMPLATE_KINDS:
            raise UserError(f"{where}.{kind}: no such kind of record; use {', '.join(TEMPLATE_KINDS)}")
    return {kind: check_template(text, ("prompt",), f"{where}.{kind}") for kind, text in templates.items()}


def chat_prompt(user_prompt: str, family: str, tokenizer: Any, chat_format: str, answer_prefix: str = "") -> str:
    """`user_prompt` in the chat format, then `answer_prefix`."""
    return conversation_text(as_turns(user_prompt), family, tokenizer, chat_format) + answer_prefix


def lead_in(word: str, family: str, chat_format: str) -> str:
    """`word` if the published format of `family` has lead-in words, otherwise an empty string."""
    return word if chat_format == "published" and family == "llama" else ""


def composed(kind: str, prompt: str, templates: Mapping[str, str] | None = None) -> str:
    """The text of a user turn around a prompt. templates: by kind, instead of the built-in compositions."""
    template = (templates or {}).get(kind) or COMPOSITIONS.get(kind, "{prompt}")
    return template.format(prompt=prompt)


def render(
    record: AlignedRecord, family: str, tokenizer: Any, chat_format: str, templates: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """The prompt text and the answer text of a record, without EOS. The prompt of plain text is empty.

    templates: text around prompts by kind, instead of the built-in one. Answers to them have no lead-in word.
    """
    kind, prompt, answer = record["kind"], record["prompt"], record["answer"]
    if prompt is None:
        return "", answer
    if kind in CONTINUED_KINDS and isinstance(prompt, str):
        return prompt, answer

    # A template from the configuration replaces the built-in text, its lead-in word included.
    is_built_in = kind in COMPOSITIONS and kind not in (templates or {})
    prefix = lead_in(LEAD_IN, family, chat_format) if is_built_in else ""

    turns = as_turns(prompt)
    # The turns of a conversation are complete. Other kinds need their template.
    if kind not in TURN_KINDS:
        turns = [
            {"role": "user", "content": composed(kind, turn["content"], templates)}
            if turn["role"] == "user"
            else {"role": turn["role"], "content": prefix + _after_prefix(turn["content"], prefix)}
            for turn in turns
        ]
    text = conversation_text(turns, family, tokenizer, chat_format, kind) + prefix
    if chat_format == "plain":
        return text, PLAIN_BREAK + answer
    return text, _after_prefix(_after_think(answer, text), prefix)


def _after_think(answer: str, prompt: str) -> str:
    """`answer` without the opening of its reasoning if the prompt ends with it. Data sets keep the tag."""
    # Includes the line break after the tag, and the closing tag of templates that switch reasoning off.
    opening = prompt[prompt.rfind(THINK) :] if THINK in prompt else ""
    thought = answer.lstrip()
    if opening and thought.startswith(opening):
        return thought.removeprefix(opening)
    return thought.removeprefix(THINK) if opening.rstrip() == THINK and thought.startswith(THINK) else answer


def _after_prefix(text: str, prefix: str) -> str:
    """`text` as it follows a lead-in word, separated by one space."""
    return f" {text.lstrip()}" if prefix else text


def conversation_text(
    turns: list[Turn],
    family: str,
    tokenizer: Any,
    chat_format: str,
    field: str = TURN_KINDS[0],
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The text of all turns in the chat format, and the start of the assistant's next turn.

    chat_format: as `target_format.resolve_chat_format` returns it. field: that of the turns, for errors. variables:
    those of the chat template. Raises RecordError for a role that only a chat template can format.
    """
    if chat_format == "tokenizer":
        return apply_template(tokenizer, turns, True, variables)
    for number, turn in enumerate(turns):
        if turn["role"] not in PUBLISHED_ROLES:
            raise RecordError(
                f"{field}[{number}].role",
                f"is '{turn['role']}', which chat_format '{chat_format}' does not support; leave this record out",
            )
    if chat_format == "plain":
        return PLAIN_BREAK.join(turn["content"] for turn in turns)
    # The published drafts were trained with this system turn.
    if not turns or turns[0]["role"] != "system":
        turns = [SYSTEM_TURN, *turns]
    before, after = TURN_FORMATS[family]
    texts = (f"{before}{turn['role']}\n{turn['content']}{after}\n" for turn in turns)
    return "".join(texts) + f"{before}assistant\n"


def apply_template(
    tokenizer: Any,
    turns: list[Turn],
    add_generation_prompt: bool = False,
    variables: Mapping[str, Any] | None = None,
) -> str:
    """The text of the turns in the tokenizer's chat template. Raises RecordError for any error of the template."""
    try:
        # With chat_template named here, no variable replaces the template itself.
        options = {"tokenize": False, "add_generation_prompt": add_generation_prompt, "chat_template": None}
        return tokenizer.apply_chat_template(turns, **options, **(variables or {}))
    except Exception as error:  # a template can raise what Python's operators and methods raise
        # The message of a template's own raise_exception says what is wrong.
        reason = f"{type(error).__name__}: {first_line(error)}"
        reason = first_line(error) if type(error) is TemplateError else reason
        raise RecordError(None, f"the tokenizer's chat template fails on these turns ({reason})") from error


def check_embedded(ids: Sequence[int], vocab_size: int, tokenizer: Any, where: str) -> None:
    """Raise UserError that starts with `where` for a token that only the tokenizer has, and not the target."""
    token = max(ids, default=0)
    if token >= vocab_size:
        text = tokenizer.convert_ids_to_tokens(int(token))
        raise UserError(
            f"{where}: token {token} ({text!r}) has no embedding, the target has {vocab_size}; remove it from the text"
        )


def encode_texts(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of each text, without EOS. They start with exactly one BOS if the tokenizer adds one."""
    return _with_bos(_encode(texts, tokenizer)["input_ids"], tokenizer) if texts else []


def encode_pairs(pairs: Sequence[tuple[str, str]], tokenizer: Any) -> tuple[list[list[int]], list[list[int]]]:
    """`encode_texts` of each prompt with its answer as one text, as the target reads it, and of each prompt alone."""
    if not pairs:
        return [], []
    encoded = _encode([prompt + answer for prompt, answer in pairs], tokenizer)
    ends = [(0, 0)] * len(pairs)
    if encoded.encodings:  # None from a tokenizer in Python
        tokens = tokenizer.added_tokens_decoder.items()
        special = {number: token.content for number, token in tokens if not token.normalized}
        ends = [_last_special(prompt, one, special) for (prompt, _), one in zip(pairs, encoded.encodings, strict=True)]
    # Text before a special token has the same tokens without the text after it, and is most of a long prompt.
    rest = _encode([prompt[start:] for (prompt, _), (_, start) in zip(pairs, ends, strict=True)], tokenizer)
    whole = encoded["input_ids"]
    alone = [ids[:index] + end for ids, (index, _), end in zip(whole, ends, rest["input_ids"], strict=True)]
    return _with_bos(whole, tokenizer), _with_bos(alone, tokenizer)


def _last_special(prompt: str, encoding: Any, special: Mapping[int, str]) -> tuple[int, int]:
    """Index and first character of the last token that stands for its text in `special`, within the prompt.

    encoding: that of the prompt and its answer. (0, 0) without such a token.
    """
    ids = encoding.ids if prompt else []
    for index in reversed(range(len(ids))):
        if ids[index] in special:
            start, end = encoding.token_to_chars(index)
            # Other text can have its id too: unknown characters that of <unk>.
            if special[ids[index]] in prompt[start:end]:
                return index, start
    return 0, 0


def _encode(texts: Sequence[str], tokenizer: Any) -> Any:
    return tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)


def _with_bos(encoded: list[list[int]], tokenizer: Any) -> list[list[int]]:
    """Token ids of texts that start with exactly one BOS if the tokenizer adds one."""
    # Some tokenizers have a BOS that they never add, so the tokenizer is asked.
    bos = tokenizer.bos_token_id
    if bos is None or tokenizer("")["input_ids"][:1] != [bos]:
        return encoded
    # A chat template may have written the BOS already.
    return [ids if ids[:1] == [bos] else [bos, *ids] for ids in encoded]
