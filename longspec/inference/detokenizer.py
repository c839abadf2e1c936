"""Text from tokens that arrive one by one."""

from functools import partial
from typing import Any

REPLACEMENT = "\ufffd"
"""The character that a tokenizer decodes incomplete bytes to."""
EDGE = 5
"""Number of tokens that tell whether a run of broken characters goes on: a character's four, which may be one byte
each, and one more, at which a run of bytes may begin."""
# A model may have learned escape sequences, which would move the cursor or rename the window.
CONTROL_CHARACTERS = {code: None for code in (*range(32), *range(127, 160)) if chr(code) not in "\n\t"}
"""Translation table that removes terminal control codes from a text."""


def printable(text: str) -> str:
    """`text` without terminal control codes."""
    return text.translate(CONTROL_CHARACTERS)


class Detokenizer:
    """Turns a row's tokens into pieces of text, each held back while its last character is incomplete. The tokens of
    the last two pieces are decoded again, because a tokenizer may drop the space in front of the first token."""

    def __init__(self, tokenizer: Any) -> None:
        # The tokenizer that transformers wraps decodes the same text in a sixth of the time.
        backend = getattr(tokenizer, "backend_tokenizer", None)
        options = {} if backend else {"clean_up_tokenization_spaces": False}
        self._decode = partial((backend or tokenizer).decode, skip_special_tokens=True, **options)
        self._tokens: list[int] = []
        """The tokens of the last piece, then those that came after it."""
        self._emitted = 0
        """Number of `_tokens` that belong to the last piece."""
        self._special = frozenset(tokenizer.all_special_ids)

    @property
    def held(self) -> str:
        """The text of the tokens after the last piece: once no token follows, the bytes of an incomplete character."""
        before = self._decode(self._tokens[: self._emitted])
        return self._decode(self._tokens)[len(before) :]

    def add(self, token: int) -> str:
        """The text that the token completes; empty for special tokens and parts of characters."""
        if token in self._special and not self._decode([token]):
            return ""  # not kept: a long run of them would be decoded again with each token
        self._tokens.append(token)
        start = self._emitted
        if len(self._tokens) > start + 2 * EDGE:  # else an endless run would be decoded again with each token
            # The first tokens, too: some decoders replace all bytes of a run if one of them is invalid.
            edges = self._tokens[start : start + EDGE] + self._tokens[-EDGE:]
            if self._decode(edges).endswith(REPLACEMENT):
                return ""
        text = self.held
        if text.endswith(REPLACEMENT) or not text:
            return ""
        self._tokens = self._tokens[self._emitted :]
        self._emitted = len(self._tokens)
        return text
