"""The chat format and special tokens of a target: the published ones for a published pair, otherwise its own."""

from collections.abc import Callable, Sequence
from typing import Any

from longspec.chat_template import template_text
from longspec.data.aligners import Turn
from longspec.data.templates import CHAT_FORMATS, TURN_FORMATS, apply_template
from longspec.errors import UserError

AUTO = "auto"
CHAT_FORMAT_CHOICES = (AUTO, *CHAT_FORMATS)
OWN_IDS = (None, None)
PUBLISHED_TARGETS: dict[str, tuple[int | None, int | None]] = {
    "lmsys/vicuna-7b-v1.5-16k": OWN_IDS,
    "lmsys/vicuna-13b-v1.5-16k": OWN_IDS,
    "lmsys/longchat-7b-v1.5-32k": OWN_IDS,
    "lmsys/longchat-13b-16k": OWN_IDS,
    "gradientai/Llama-3-8B-Instruct-262k": (128009, 128001),
    "Qwen/QwQ-32B-Preview": (151645, 151643),
}
"""EOS and pad ids that the published drafts were trained with, by hub id of the target; None for the target's own. A
copy of a target at another path uses its own."""


def resolve_chat_format(
    chat_format: str, target: str, family: str, tokenizer: Any, say: Callable[[str], object] = lambda line: None
) -> str:
    """The chat format of a target, one of CHAT_FORMATS. A format other than "auto" is checked and returned.

    "auto" is "published" for a published target, "tokenizer" for a tokenizer with a chat template, and "plain" for
    other targets, which are base models. say: called with a line about the last case. Raises UserError for an unknown
    format or one that the target does not support.
    """
    if chat_format == AUTO and target not in PUBLISHED_TARGETS:
        if template_text(tokenizer) is not None:
            return "tokenizer"
        say(f"{target}: its tokenizer has no chat template, so prompts are plain text (chat_format plain)")
        return "plain"
    if chat_format in (AUTO, "published"):
        if family not in TURN_FORMATS:
            raise UserError(f"no published chat format for model family '{family}', only for {', '.join(TURN_FORMATS)}")
        return "published"
    if chat_format not in CHAT_FORMATS:
        raise UserError(f"unknown chat_format '{chat_format}': use one of {', '.join(CHAT_FORMAT_CHOICES)}")
    if chat_format == "tokenizer" and template_text(tokenizer) is None:
        raise UserError("chat_format 'tokenizer' needs a tokenizer with a chat template; use 'plain' or 'published'")
    return chat_format


def stop_tokens(tokenizer: Any, generation_eos: Sequence[int]) -> list[int]:
    """The token ids that end an answer: those of the generation config, then the tokenizer's EOS."""
    own = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
    return list(dict.fromkeys((*generation_eos, *own)))


def answer_end(tokenizer: Any, generation_eos: Sequence[int], chat_format: str) -> int | None:
    """The token that ends answers in training, one of `stop_tokens`; None if there is none.

    In the format "tokenizer" it is the token that the chat template writes after an answer (Llama-3's <|eot_id|>,
    ChatML's <|im_end|>). Otherwise it is the tokenizer's EOS, or the first stop token of the generation config.
    """
    stops = stop_tokens(tokenizer, generation_eos)
    candidates = [_template_end(tokenizer)] if chat_format == "tokenizer" else []
    candidates += [tokenizer.eos_token_id, *stops]
    return next((token for token in candidates if token in stops), None)


def _template_end(tokenizer: Any) -> int | None:
    """The first token that the chat template writes after an answer; None if there is none or the template fails."""
    answer = "An answer."
    turns: list[Turn] = [{"role": "user", "content": "A question?"}, {"role": "assistant", "content": answer}]
    try:
        # Rendered once to see which token follows an answer; the texts are arbitrary.
        text = apply_template(tokenizer, turns)
    except UserError:
        return None
    after = tokenizer(text.rpartition(answer)[2].strip(), add_special_tokens=False)["input_ids"]
    return after[0] if after else None
