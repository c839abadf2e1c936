"""The text of an answer, token by token, up to a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from longspec.inference.detokenizer import Detokenizer
from longspec.inference.origins import Origin


@dataclass
class Piece:
    """A token, with the text that it completes: none for a special token or a part of a character."""

    id: int | None
    """None for text that is left over after the last token."""
    text: str
    origin: Origin
    logprob: float | None = None


class AnswerText:
    """Detokenizes an answer, and holds text back while it may be the beginning of a stop string."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self.stops = stops
        self.stopped = False
        """Whether a stop string occurred; nothing more is released."""
        self.tokens = 0
        """Number of tokens up to the end of the answer, those of a stop string included."""
        self._detokenizer = Detokenizer(tokenizer)
        self._held: list[Piece] = []

    def add(self, ids: Sequence[int], origins: Sequence[Origin], logprobs: Sequence[float] | None) -> list[Piece]:
        """The pieces that can be released once these tokens are known."""
        known: Sequence[float | None] = [None] * len(ids) if logprobs is None else logprobs
        for token, origin, logprob in zip(ids, origins, known, strict=True):
            self.tokens += 1
            self._held.append(Piece(token, self._detokenizer.add(token), origin, logprob))
            if self.stops and self._cut():
                break  # the round's further tokens are not part of the answer
        return self._release(self._unsure())

    def end(self) -> list[Piece]:
        """The pieces still held, when no token follows. The last one ends with U+FFFD if its character is cut off."""
        if self._held or not self.stopped:
            rest = self._detokenizer.end()
            if rest and not self._held:
                self._held.append(Piece(None, rest, "target"))
            elif rest:
                self._held[-1].text += rest
            self._cut()
        return self._release(0)

    def _cut(self) -> bool:
        """End the held text before the first stop string in it."""
        # A stop string can span several tokens, but never released text: `_unsure` holds its beginnings back.
        text = "".join(piece.text for piece in self._held)
        found = [start for start in map(text.find, self.stops) if start >= 0]
        if not found:
            return False

        left = min(found)  # characters of the answer that are still to be kept
        kept = []
        for piece in self._held:
            if left <= 0:
                break
            kept.append(Piece(piece.id, piece.text[:left], piece.origin, piece.logprob))
            left -= len(piece.text)
        self._held, self.stopped = kept, True
        return True

    def _unsure(self) -> int:
        """Number of characters at the end of the held text that may be the beginning of a stop string."""
        if self.stopped or not self.stops:
            return 0
        text = "".join(piece.text for piece in self._held)
        longest = min(len(text), max(map(len, self.stops)) - 1)  # the whole string would have been found
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops):
                return length
        return 0

    def _release(self, held_back: int) -> list[Piece]:
        """Take whole pieces off the held ones, but for the last `held_back` characters."""
        free = sum(len(piece.text) for piece in self._held) - held_back
        count = 0
        for piece in self._held:
            if len(piece.text) > free:
                break
            free -= len(piece.text)
            count += 1
        released, self._held = self._held[:count], self._held[count:]
        return released
