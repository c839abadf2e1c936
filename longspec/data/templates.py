"""From the common form to text, and from text to token ids: what the target reads before it answers."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import TemplateError

from longspec.data.aligners import Sample, Turn
from longspec.data.records import RecordError
from longspec.errors import UserError

CHAT_FORMATS = ("published", "tokenizer")
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
    """The units that make up a user's turn, and the word that opens the answer to it."""

    units: tuple[str, ...]
    answer_prefix: str = ""

    def fill(self, prompt: str) -> str:
        return "\n\n".join(self.units).replace("{prompt}", prompt)


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


def chat_prompt(
    user_prompt: str,
    family: str,
    tokenizer: Any = None,
    chat_format: str = "published",
    answer_prefix: str = "",
) -> str:
    """The text a model of `family` is asked with: chat format around `user_prompt`, then `answer_prefix`.

    `published` is the format the published drafts were trained on; `tokenizer` is the tokenizer's own chat template.
    Raises UserError for an unknown family or format, or a tokenizer without a template.
    """
    return _conversation([{"role": "user", "content": user_prompt}], family, tokenizer, chat_format) + answer_prefix


def render(sample: Sample, family: str, tokenizer: Any, chat_format: str) -> tuple[str, str]:
    """(prompt text, answer text) of a sample; the prompt is empty for plain text. The answer has no EOS yet."""
    kind, prompt, answer = sample["kind"], sample["prompt"], sample["answer"]
    if prompt is None:
        return "", answer
    if isinstance(prompt, list):
        return _conversation(prompt, family, tokenizer, chat_format), answer
    if kind in CONTINUED_KINDS:
        return prompt, answer
    composition = COMPOSITIONS.get(kind, BARE)
    led_in = chat_format == "published" and TURN_FORMATS[family].leads_in_answers
    prefix = composition.answer_prefix if led_in else ""
    text = chat_prompt(composition.fill(prompt), family, tokenizer, chat_format, prefix)
    return text, f" {answer.lstrip()}" if prefix else answer


def check_chat_format(family: str, tokenizer: Any, chat_format: str) -> None:
    """Raises UserError for a family or a format that does not exist, or a tokenizer without a chat template."""
    if family not in TURN_FORMATS:
        raise UserError(f"unknown model family '{family}': use one of {', '.join(TURN_FORMATS)}")
    if chat_format not in CHAT_FORMATS:
        raise UserError(f"unknown chat_format '{chat_format}': use one of {', '.join(CHAT_FORMATS)}")
    if chat_format == "tokenizer" and not getattr(tokenizer, "chat_template", None):
        raise UserError("chat_format 'tokenizer' needs a tokenizer with a chat template; use 'published'")


def _conversation(turns: list[Turn], family: str, tokenizer: Any, chat_format: str) -> str:
    """All turns, ready for the assistant's next words."""
    check_chat_format(family, tokenizer, chat_format)
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
