"""Printing an answer while it is generated: text piece by piece, colored by origin, and its figures."""

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text
from torch import Tensor

from longspec.inference.detokenizer import Detokenizer, printable
from longspec.inference.engine.requests import Origin

STYLES: dict[Origin, str] = {"target": "", "draft": "#56b4e9", "lookup": "#e69f00"}
"""Sky blue and orange of the Okabe-Ito palette, which color-blind readers can tell apart."""
_DRAFT_LEGEND = f"Plain text: the target's own tokens. [{STYLES['draft']}]Blue: accepted tokens of the draft.[/]"
LEGEND = {
    "lookup": f"Plain text: the target's own tokens. [{STYLES['lookup']}]Orange: accepted tokens of prompt lookup.[/]",
    "auto": f"{_DRAFT_LEGEND} [{STYLES['lookup']}]Orange: those of prompt lookup.[/]",
    **dict.fromkeys(("tree", "seq", "magicdec"), _DRAFT_LEGEND),
}
"""Explanations of the colors by method; vanilla needs none."""


@dataclass
class Answer:
    """The part of an answer that is generated so far, and its figures. Times are in seconds, as the user sees them."""

    text: str = ""
    prompt_tokens: int = 0
    origins: Counter[Origin] = field(default_factory=Counter)
    """Number of tokens by origin."""
    rounds: int = 0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    """Time from the first token to the last."""

    @property
    def tokens(self) -> int:
        return self.origins.total()


class AnswerStream:
    """A streamer of `longspec.generate` that prints each token in the color of its origin."""

    def __init__(self, console: Console, tokenizer: Any) -> None:
        self.console = console
        self.answer = Answer()
        self.pieces = Detokenizer(tokenizer)
        self.stopped = False
        self._start = time.perf_counter()
        self._previous: Origin = "target"
        self._ended = False

    def put(self, value: Tensor) -> None:
        """Take the prompt, LongTensor [1, P]."""
        self.answer.prompt_tokens = value.numel()

    def put_from(self, value: Tensor, origin: Origin) -> None:
        """Take a new token, LongTensor [1]. Raises KeyboardInterrupt after a SIGINT."""
        # Raised here and not in the handler, so that generation ends between two tokens.
        if self.stopped:
            raise KeyboardInterrupt
        answer = self.answer
        since_start = time.perf_counter() - self._start
        if not answer.tokens:
            answer.ttft_s = since_start
        elif self._previous == "target":  # a round ends with a token of the target
            answer.rounds += 1
        answer.decode_s = since_start - answer.ttft_s
        answer.origins[origin] += 1
        self._previous = origin
        self._print(self.pieces.add(int(value)), origin)

    def end(self) -> None:
        if not self._ended:
            self._ended = True
            self._print(self.pieces.end(), self._previous)
            self.console.print()

    def _print(self, piece: str, origin: Origin) -> None:
        if piece:
            self.answer.text += piece
            shown = Text(printable(piece), STYLES[origin])
            self.console.print(shown, end="", soft_wrap=True)

    def note_sigint(self, number: int, frame: FrameType | None) -> None:
        """A handler of SIGINT: the first one ends the answer after its next token, and a second one immediately."""
        if self.stopped:
            raise KeyboardInterrupt
        self.stopped = True


def describe(answers: Sequence[Answer], whole: bool = False) -> str:
    """One line of figures for answers of at least one token each. `whole` adds token origins and times."""
    tokens = sum(answer.tokens for answer in answers)
    rounds = sum(answer.rounds for answer in answers)
    seconds = sum(answer.decode_s for answer in answers)
    decoded = tokens - len(answers)  # the first token of an answer comes from prefill
    parts = [f"{tokens} tokens"]
    if rounds and seconds:
        parts += [f"{decoded / seconds:.1f} tokens/s", f"{decoded / rounds:.2f} tokens per pass"]
    if whole:
        origins = sum((answer.origins for answer in answers), Counter())
        parts += [f"{count} from {origin}" for origin, count in sorted(origins.items())]
        longest = max(answer.prompt_tokens for answer in answers)
        first = sum(answer.ttft_s for answer in answers) / len(answers)
        parts += [f"first token after {first:.2f} s", f"prompts of up to {longest} tokens"]
    return ", ".join(parts)
