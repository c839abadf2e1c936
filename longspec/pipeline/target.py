"""The target's tokenizer and chat format, without its weights."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from longspec.data.templates import conversation_text, encode_texts
from longspec.inference.registry import choose_pair
from longspec.models.target_files import load_tokenizer, read_config

CHAT_FORMAT = "tokenizer"
LONGEST_TOKEN = 5
"""Upper bound on the average number of characters per token, which limits how much text is tokenized."""


@dataclass(frozen=True)
class TargetText:
    """Formats prompts for the target and measures texts in its tokens."""

    path: str
    family: str
    tokenizer: Any

    @classmethod
    def load(cls, name: str) -> "TargetText":
        """Load the tokenizer of a target as in `longspec.load_pair`. Raises UserError if its files are missing."""
        path = choose_pair(name).target
        config = read_config(path)
        return cls(path, config.model_type, load_tokenizer(path, config))

    def prompt_ids(self, record: dict[str, Any]) -> list[int]:
        """Token ids of a prompt: a record's "messages" in the chat format, or its "prefix" unchanged."""
        if "prefix" in record:
            text = record["prefix"]
        else:
            text = conversation_text(record["messages"], self.family, self.tokenizer, CHAT_FORMAT)
        return encode_texts([text], self.tokenizer)[0]

    def count(self, text: str) -> int:
        """Number of tokens of a text, without special tokens around it."""
        return len(self._encode(text))

    @cached_property
    def exchange_overhead(self) -> int:
        """Number of tokens that the chat format adds to an earlier user turn and its answer."""
        turns = [{"role": role, "content": ""} for role in ("user", "assistant", "user")]
        return len(self.prompt_ids({"messages": turns})) - len(self.prompt_ids({"messages": turns[:1]}))

    def tail(self, text: str, tokens: int) -> tuple[str, int]:
        """The longest end of `text` in whole lines that has at most `tokens` tokens, and its number of tokens."""
        piece = text[-LONGEST_TOKEN * tokens :] if tokens > 0 else ""
        encoding = self._encode(piece)
        if len(encoding) <= max(0, tokens):
            return piece, len(encoding)
        cut = piece[encoding.token_to_chars(len(encoding) - tokens)[0] :]
        return cut[cut.find("\n") + 1 :] or cut, tokens

    def _encode(self, text: str) -> Any:
        return self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
