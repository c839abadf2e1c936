"""From the common form to text, and from text to token ids: what the target reads before it answers."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from string import Formatter
from typing import Any

from jinja2 import TemplateError

from longspec.data.aligners import Sample, Turn
from longspec.data.records import KINDS, TURN_KINDS, RecordError
from longspec.errors import UserError

CHAT_FORMATS = ("published", "tokenizer", "plain")
"""Turns as the published drafts saw them, by the tokenizer's chat template, or as text without marks around them."""
PLAIN_BREAK = "\n\n"
"""Separator of turns in the format plain; the one before an answer belongs to the answer."""
PUBLISHED_ROLES = ("system", "user", "assistant")
SYSTEM_TURN: Turn = {"role": "system", "content": "You are a helpful assistant"}


@dataclass(frozen=True)
class TurnFormat:
    """How one family's published drafts were shown a turn: marks around it, and whether answers have a lead-in."""

    before: str
    after: str
    leads_in_answers: bool

    def turn(self, role: str, content: str) -> str:
        return f"{self.before}{role}\n{content}{self.after}\n"


TURN_FORMATS = {
    "llama": TurnFormat("<s>", "</s>", leads_in_answers=True),
    "qwen2": TurnFormat("<|im_start|>", "<|im_end|>", leads_in_answers=False),
}


@dataclass(frozen=True)
class Composition:
    """The units that make up a user's turn, and the word that opens the answer to it in the published format."""

    units: tuple[str, ...]
    answer_prefix: str = ""

    def fill(self, prompt: str) -> str:
        return "\n\n".join(self.units).format(prompt=prompt)


BARE = Composition(("{prompt}",))
SUM_UP = "Now write the summary."
COMPOSITIONS = {
    "article": Composition(
        (
            "Below is a scientific article. Write the abstract that belongs to it.",
            "Article:\n{prompt}",
            "Now write the abstract.",
        ),
        "Summary:",
    ),
    "report": Composition(
        ("Below is a report from a public body. Sum up in about a page what it finds.", "Report:\n{prompt}", SUM_UP),
        "Summary:",
    ),
    "document": Composition(
        ("Below are one or more news stories on one event. Sum them up in a single text.", "News:\n{prompt}", SUM_UP),
        "Summary:",
    ),
    "transcript": Composition(
        ("Below is the transcript of a meeting. Sum up what was said and decided.", "Transcript:\n{prompt}", SUM_UP),
        "Summary:",
    ),
}
CONTINUED_KINDS = ("prefix",)  # the answer goes on where the prompt stops, without a chat around them
TEMPLATE_KINDS = tuple(
    dict.fromkeys(kind.name for kind in KINDS if kind.prompt_field and kind.name not in CONTINUED_KINDS)
)
"""Kinds of records whose prompt is put into a template."""


def check_template(text: object, fields: Sequence[str], where: str) -> str:
    """`text`, which must be a format string that quotes some of `fields` by name and nothing else.

    Raises UserError that begins with `where`.
    """
    if not isinstance(text, str):
        raise UserError(f"{where}: must be text with {_braced(fields)}, not {type(text).__name__}")
    try:
        quoted = [(name, spec, conversion) for _, name, spec, conversion in Formatter().parse(text) if name is not None]
    except ValueError as error:
        raise UserError(f"{where}: {error}; a brace that is no field is written twice") from error
    for name, spec, conversion in quoted:
        if name not in fields:
            raise UserError(f"{where}: no field {{{name}}}; it may quote {_braced(fields)}, other braces are doubled")
        if spec or conversion:
            raise UserError(f"{where}: a field is quoted only by its name, as {{{name}}}")
    if not quoted:
        raise UserError(f"{where}: quotes no field; it needs {_braced(fields)}")
    return text


def check_templates(templates: Mapping[str, object], where: str) -> dict[str, str]:
    """`templates`, which must map kinds of TEMPLATE_KINDS to text with {prompt}. Raises UserError with `where`."""
    for kind in templates:
        if kind not in TEMPLATE_KINDS:
            raise UserError(f"{where}.{kind}: no such kind of record; use {', '.join(TEMPLATE_KINDS)}")
    return {kind: check_template(text, ("prompt",), f"{where}.{kind}") for kind, text in templates.items()}


def _braced(fields: Sequence[str]) -> str:
    return " or ".join(f"{{{name}}}" for name in fields)


def chat_prompt(
    user_prompt: str,
    family: str,
    tokenizer: Any,
    chat_format: str,
    answer_prefix: str = "",
) -> str:
    """The text that a model of `family` is asked with: chat format around `user_prompt`, then `answer_prefix`.

    Raises UserError for an unknown family or format, or a tokenizer without a template.
    """
    return _conversation([{"role": "user", "content": user_prompt}], family, tokenizer, chat_format) + answer_prefix


def lead_in(word: str, family: str, chat_format: str) -> str:
    """`word` if the published format of `family` opens answers with one, else nothing."""
    return word if chat_format == "published" and TURN_FORMATS[family].leads_in_answers else ""


def render(
    sample: Sample, family: str, tokenizer: Any, chat_format: str, templates: Mapping[str, str] | None = None
) -> tuple[str, str]:
    """(prompt text, answer text) of a sample; the prompt is empty for plain text. The answer has no EOS yet.

    `templates` replace the built-in text around prompts by kind; answers to them have no lead-in word.
    """
    kind, prompt, answer = sample["kind"], sample["prompt"], sample["answer"]
    if prompt is None:
        return "", answer
    if kind in CONTINUED_KINDS and isinstance(prompt, str):
        return prompt, answer
    own = (templates or {}).get(kind)
    composition = COMPOSITIONS.get(kind, BARE) if own is None else Composition((own,))
    prefix = lead_in(composition.answer_prefix, family, chat_format)

    def after_prefix(text: str) -> str:
        return f" {text.lstrip()}" if prefix else text

    if isinstance(prompt, str):
        prompt = [{"role": "user", "content": prompt}]
    _check_roles(prompt, kind, chat_format)
    if kind not in TURN_KINDS:
        prompt = [
            {"role": role, "content": composition.fill(text) if role == "user" else prefix + after_prefix(text)}
            for role, text in ((turn["role"], turn["content"]) for turn in prompt)
        ]
    text = _conversation(prompt, family, tokenizer, chat_format) + prefix
    return text, PLAIN_BREAK + answer if chat_format == "plain" else after_prefix(answer)


def check_chat_format(family: str, tokenizer: Any, chat_format: str) -> None:
    """Raises UserError for a format that does not exist or cannot be had with this family or tokenizer."""
    if chat_format not in CHAT_FORMATS:
        raise UserError(f"unknown chat_format '{chat_format}': use one of {', '.join(CHAT_FORMATS)}")
    if chat_format == "published" and family not in TURN_FORMATS:
        raise UserError(f"no published chat format for model family '{family}', only for {', '.join(TURN_FORMATS)}")
    if chat_format == "tokenizer" and not getattr(tokenizer, "chat_template", None):
        raise UserError("chat_format 'tokenizer' needs a tokenizer with a chat template; use 'plain' or 'published'")


def _check_roles(turns: list[Turn], field: str, chat_format: str) -> None:
    """Raise RecordError for a role that only a chat template could show."""
    if chat_format == "tokenizer":
        return
    for number, turn in enumerate(turns):
        if turn["role"] not in PUBLISHED_ROLES:
            raise RecordError(
                f"{field}[{number}].role",
                f"is '{turn['role']}', which chat_format '{chat_format}' has no form for; leave this record out",
            )


def _conversation(turns: list[Turn], family: str, tokenizer: Any, chat_format: str) -> str:
    """All turns, ready for the assistant's next words."""
    check_chat_format(family, tokenizer, chat_format)
    if chat_format == "plain":
        return PLAIN_BREAK.join(turn["content"] for turn in turns)
    if chat_format == "tokenizer":
        try:
            return tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        except TemplateError as error:
            raise RecordError("role", f"is one the tokenizer's chat template refuses here ({error})") from error
    if not turns or turns[0]["role"] != "system":
        turns = [SYSTEM_TURN, *turns]
    form = TURN_FORMATS[family]
    return "".join(form.turn(**turn) for turn in turns) + f"{form.before}assistant\n"


def encode_texts(texts: Sequence[str], tokenizer: Any) -> list[list[int]]:
    """Token ids of each text as a target expects them: one BOS in front if the tokenizer uses it, never two, no EOS."""
    if not texts:
        return []
    encoded = tokenizer(list(texts), add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
    bos = tokenizer.bos_token_id
    if bos is None or tokenizer("")["input_ids"][:1] != [bos]:
        return encoded
    return [ids if ids[:1] == [bos] else [bos, *ids] for ids in encoded]
