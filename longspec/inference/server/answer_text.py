"""The text of an answer, token by token, up to a stop string."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, Literal

from longspec.inference.detokenizer import Detokenizer
from longspec.inference.engine.requests import Alternatives, Origin, PromptScores, Tokens


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


class AnswerText:
    """Detokenizes an answer, and holds text back while it may be the beginning of a stop string."""

    def __init__(self, tokenizer: Any, stops: Sequence[str] = ()) -> None:
        self.stops = stops
        self.stopped = False
        """Whether a stop string occurred; nothing more is released."""
        self.tokens = 0
        """Number of tokens up to the end of the answer, those of a stop string included."""
        self._detokenizer = Detokenizer(tokenizer)
        self._specials: dict[int, str] = {}
        if stops:
            added = tokenizer.added_tokens_decoder.items()
            self._specials = {token: entry.content for token, entry in added if entry.special}
        self._held: list[Piece] = []

    def add(self, event: Tokens) -> list[Piece]:
        """The pieces that can be released once these tokens are known."""
        unknown = [None] * len(event.ids)
        known = (event.origins, event.logprobs or unknown, event.alternatives or unknown)
        for token, origin, logprob, alternatives in zip(event.ids, *known, strict=True):
            self.tokens += 1
            text = self._detokenizer.add(token)
            self._held.append(Piece(token, text, origin, logprob, alternatives, self._specials.get(token, "")))
            if self.stops and self._cut():
                break  # the round's further tokens are not part of the answer
        return self._release(at_end=False)

    def end(self) -> list[Piece]:
        """The pieces still held, when no token follows. The last one ends with U+FFFD if its character is cut off."""
        if self._held or not self.stopped:
            rest = self._detokenizer.end()
            if rest and not self._held:
                self._held.append(Piece(None, rest, "target"))
            elif rest:
                self._held[-1].text += rest
            self._cut()
        return self._release(at_end=True)

    def _cut(self) -> bool:
        """End the held text before the first stop string in it."""
        # A stop string can span several tokens, but never released text: `_unsure` holds its beginnings back.
        cuts = []
        for texts in self._views():
            whole = "".join(texts)
            starts = [start for start in map(whole.find, self.stops) if start >= 0]
            if starts:
                cuts.append(_split(texts, min(starts)))
        if not cuts:
            return False

        count, rest = min(cuts)
        kept = self._held[:count]
        if rest:
            kept.append(replace(self._held[count], text=self._held[count].text[:rest]))
        self._held, self.stopped = kept, True
        return True

    def _views(self) -> list[list[str]]:
        """The texts of the held pieces, as they are shown and, if it differs, with the special tokens."""
        shown = [piece.text for piece in self._held]
        with_special = [piece.special or piece.text for piece in self._held]
        return [shown] if with_special == shown else [shown, with_special]

    def _unsure(self, text: str) -> int:
        """Number of characters at the end of a text that may be the beginning of a stop string."""
        if self.stopped or not self.stops:
            return 0
        longest = min(len(text), max(map(len, self.stops)) - 1)  # the whole string would have been found
        for length in range(longest, 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self.stops):
                return length
        return 0

    def _release(self, at_end: bool) -> list[Piece]:
        """Take pieces off the held ones: at the end all, else those that no stop string can reach."""
        count = len(self._held)
        for texts in [] if at_end else self._views():
            free = sum(map(len, texts)) - self._unsure("".join(texts))
            lengths = accumulate(map(len, texts))
            count = min(count, sum(length <= free for length in lengths))
        released, self._held = self._held[:count], self._held[count:]
        return released


def prompt_pieces(tokenizer: Any, ids: Sequence[int], text: str | None, scores: Sequence[PromptScores]) -> list[Piece]:
    """The tokens of a prompt as the beginning of its answer. text: the prompt's own, None if the client sent token ids.
    scores: those of the tokens from the second one on; none if they are unknown."""
    detokenizer = Detokenizer(tokenizer)
    texts = [detokenizer.add(token) for token in ids]
    texts[-1] += detokenizer.end()
    if text not in (None, "".join(texts)):  # the tokenizer changes it, or the text names special tokens
        texts = [text, *[""] * (len(ids) - 1)]
    pieces = [Piece(token, part, "prompt") for token, part in zip(ids, texts, strict=True)]
    following = iter(pieces[1:])
    for part in scores:
        # The pieces come last, because zip takes one from each before it finds that another has ended.
        for logprob, alternatives, piece in zip(part.logprobs, part.alternatives, following, strict=False):
            piece.logprob, piece.alternatives = logprob, alternatives
    return pieces


def _split(texts: Sequence[str], length: int) -> tuple[int, int]:
    """The number of whole texts in the first `length` characters of all, and the characters of the next one."""
    for count, text in enumerate(texts):
        if length == 0 or len(text) > length:
            return count, length
        length -= len(text)
    return len(texts), 0
