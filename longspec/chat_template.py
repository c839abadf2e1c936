"""The chat template of a tokenizer that has one or several by name."""

from typing import Any

from longspec.errors import UserError

DEFAULT = "default"
"""Name of the template in use, in transformers and in llama.cpp."""


def template_text(tokenizer: Any) -> str | None:
    """The chat template in use, or None. Raises UserError for several of which none is the default."""
    template = getattr(tokenizer, "chat_template", None)
    if isinstance(template, dict) and template:
        if DEFAULT not in template:
            names = ", ".join(map(str, template))
            raise UserError(
                f"the tokenizer has several chat templates and none named {DEFAULT!r}: {names}; rename the one to use "
                "in its tokenizer_config.json"
            )
        template = template[DEFAULT]
    if template and not isinstance(template, str):
        raise UserError(f"the tokenizer's chat template is not text but {type(template).__name__}")
    return template or None


def replace_template(tokenizer: Any, text: str) -> None:
    """Set the text of the chat template in use. Other templates of the tokenizer are kept."""
    template = tokenizer.chat_template
    tokenizer.chat_template = {**template, DEFAULT: text} if isinstance(template, dict) else text
