"""The target's files and its tokenizer, without its weights."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

from longspec.data.prompts import conversation_text
from longspec.data.templates import encode_texts
from longspec.inference.registry import choose_target
from longspec.models.target_files import load_tokenizer, read_config

CHAT_FORMAT = "tokenizer"
LONGEST_TOKEN = 5
"""Average characters per token, at most; more text than this is never tokenized to find a length."""


@dataclass(frozen=True)
class TargetText:
    """The target's view of text: chat format and lengths in tokens."""

    path: str
    """Folder or hub id."""
    family: str
    tokenizer: Any

    @classmethod
    def load(cls, name: str) -> "TargetText":
        """Raises UserError for a target without files."""
        path = choose_target(name)
        config = read_config(path)
        return cls(path, config.model_type, load_tokenizer(path, config))

    def prompt_ids(self, record: dict[str, Any]) -> list[int]:
        """Token ids of a prompt record: a conversation in the chat format, or the prefix as it is."""
        if "prefix" in record:
            text = record["prefix"]
        else:
            text = conversation_text(record["messages"], self.family, self.tokenizer, CHAT_FORMAT)
        return encode_texts([text], self.tokenizer)[0]

    def count(self, text: str) -> int:
        """Tokens of a text without special tokens around it."""
        return len(self._encode(text))

    @cached_property
    def chat_overhead(self) -> int:
        """Tokens of the chat format around one user turn."""
        return self._empty_turns("user")

    @cached_property
    def exchange_overhead(self) -> int:
        """Tokens of the chat format around an earlier user turn and its answer."""
        return self._empty_turns("user", "assistant", "user") - self.chat_overhead

    def _empty_turns(self, *roles: str) -> int:
        return len(self.prompt_ids({"messages": [{"role": role, "content": ""} for role in roles]}))

    def head(self, text: str, tokens: int) -> tuple[str, int]:
        """The first whole lines of `text` with at most this number of tokens, and their number."""
        piece = text[: LONGEST_TOKEN * tokens] if tokens > 0 else ""
        encoding = self._encode(piece)
        if len(encoding) <= max(0, tokens):
            return piece, len(encoding)
        cut = piece[: encoding.token_to_chars(tokens)[0]]
        return cut[: cut.rfind("\n") + 1] or cut, tokens

    def tail(self, text: str, tokens: int) -> tuple[str, int]:
        """The last whole lines of `text` with at most this number of tokens, and their number."""
        piece = text[-LONGEST_TOKEN * tokens :] if tokens > 0 else ""
        encoding = self._encode(piece)
        if len(encoding) <= max(0, tokens):
            return piece, len(encoding)
        cut = piece[encoding.token_to_chars(len(encoding) - tokens)[0] :]
        return cut[cut.find("\n") + 1 :], tokens

    def _encode(self, text: str) -> Any:
        return self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False)
