"""Text from tokens that arrive one by one."""

from __future__ import annotations

from typing import Any

REPLACEMENT = "\ufffd"
"""What decoding gives for bytes that are not a whole character yet."""


class Detokenizer:
    """Turns a row's tokens into pieces of text; the pieces together are the text of all tokens.

    A piece is held back while its last character is incomplete. Only the tokens since the last two pieces are decoded
    again, because a tokenizer may drop the space of the first token that it decodes.
    """

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self._tokens: list[int] = []
        self._shown = 0
        """The first `_shown` of the tokens are part of an earlier piece."""

    def add(self, token: int) -> str:
        """The text that the token completes; empty for special tokens and parts of characters."""
        self._tokens.append(token)
        before, text = self._decode(self._tokens[: self._shown]), self._decode(self._tokens)
        if len(text) <= len(before) or text.endswith(REPLACEMENT):
            return ""
        self._tokens, self._shown = self._tokens[self._shown :], len(self._tokens) - self._shown
        return text[len(before) :]

    def end(self) -> str:
        """The text that was held back: bytes without the rest of their character."""
        before, text = self._decode(self._tokens[: self._shown]), self._decode(self._tokens)
        self._tokens, self._shown = [], 0
        return text[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
