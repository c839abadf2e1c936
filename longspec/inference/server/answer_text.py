"""The text of an answer, token by token, up to a stop string."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Literal

from longspec.inference.detokenizer import Detokenizer
from longspec.inference.engine.requests import Alternatives, Origin, PromptScores, Tokens

GAP = "\ud800"
"""Stands for a character of a special token that a stop string does not name. No text contains it."""


@dataclass
class Piece:
    """A token, with the text that it completes: none for a special token or a part of a character."""

    id: int | None
    """None for text that is left over after the last token."""
    text: str
    origin: Origin | Literal["prompt"]
    logprob: float | None = None
    alternatives: Alternatives | None = None
    special: str = ""
    """The content of a special token, which is not part of the text, but which a stop string can match."""

    @property
    def matched(self) -> str:
        """What stop strings are looked for in."""
        return self.special or self.text


class AnswerText:
    """Detokenizes an answer, and holds text back while it may be the beginning of a stop string."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self.stops = stops
        self.stopped = False
        """Whether a stop string occurred; nothing more is released."""
        self.tokens = 0
        """Number of tokens up to the end of the answer, those of a stop string included."""
        self._detokenizer = Detokenizer(tokenizer)
        added = tokenizer.added_tokens_decoder.items() if stops else ()
        self._specials = {token: entry.content for token, entry in added if entry.special}
        self._held: list[Piece] = []

    def add(self, event: Tokens) -> list[Piece]:
        """The pieces that can be released once these tokens are known."""
        unknown = [None] * len(event.ids)
        known = (event.origins, event.logprobs or unknown, event.alternatives or unknown)
        may_release = not self._held
        for token, origin, logprob, alternatives in zip(event.ids, *known, strict=True):
            self.tokens += 1
            text = self._detokenizer.add(token)
            piece = Piece(token, text, origin, logprob, alternatives, self._specials.get(token, ""))
            self._held.append(piece)
            may_release |= bool(piece.matched)
            if self.stops and piece.matched and self._cut():
                break  # the round's further tokens are not part of the answer
        # Without new text, what was held may still be the beginning of a stop string.
        return self._release(self._unsure()) if may_release else []

    def end(self) -> list[Piece]:
        """The pieces still held, when no token follows. The last one ends with U+FFFD if its character is cut off."""
        if not self.stopped and (rest := self._detokenizer.held):
            self._held.append(Piece(None, rest, "target"))
            self._cut()
        return self._release(unsure=0)

    def _cut(self) -> bool:
        """End the held text before the first stop string in it, if there is one."""
        # A stop string can span several tokens, but never released text: `_unsure` holds its beginnings back.
        starts = [start for stop in self.stops if (start := self._searched(stop).find(stop)) >= 0]
        if not starts:
            return False
        self.stopped, left = True, min(starts)
        held, self._held = self._held, []
        for piece in held:
            if left <= 0:
                break
            self._held.append(piece)
            left -= len(piece.matched)
            piece.text = piece.text[: len(piece.text) + min(left, 0)]
        return True

    def _unsure(self) -> int:
        """Number of characters at the end of the held text that may be the beginning of a stop string."""
        if self.stopped:
            return 0
        texts = [(self._searched(stop), stop) for stop in self.stops]
        return max((n for text, stop in texts for n in range(1, len(stop) + 1) if text.endswith(stop[:n])), default=0)

    def _searched(self, stop: str) -> str:
        """The held text in which a stop string is looked for: "s" is not found in the special token "</s>"."""
        return "".join(piece.matched if piece.special in stop else GAP * len(piece.special) for piece in self._held)

    def _release(self, unsure: int) -> list[Piece]:
        """Take pieces off the held ones: all but those of the last `unsure` characters."""
        ends = list(accumulate(len(piece.matched) for piece in self._held))
        count = sum(end <= ends[-1] - unsure for end in ends)
        released, self._held = self._held[:count], self._held[count:]
        return released


def prompt_pieces(tokenizer: Any, ids: Sequence[int], text: str | None, scores: Sequence[PromptScores]) -> list[Piece]:
    """The tokens of a prompt as the beginning of its answer. text: the prompt's own, None if the client sent token ids.
    scores: those of the tokens from the second one on; none if they are unknown."""
    detokenizer = Detokenizer(tokenizer)
    texts = [detokenizer.add(token) for token in ids]
    texts[-1] += detokenizer.held
    if text not in (None, "".join(texts)):  # the tokenizer changes it, or the text names special tokens
        texts = [text, *[""] * (len(ids) - 1)]
    pieces = [Piece(token, part, "prompt") for token, part in zip(ids, texts, strict=True)]
    known = [pair for part in scores for pair in zip(part.logprobs, part.alternatives, strict=True)]
    for piece, (logprob, alternatives) in zip(pieces[1:], known, strict=False):
        piece.logprob, piece.alternatives = logprob, alternatives
    return pieces
