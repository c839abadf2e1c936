"""Printing an answer while it is generated: text piece by piece, colored by origin, and its figures."""

from collections.abc import Sequence
from types import FrameType
from typing import Any

from rich.console import Console
from rich.text import Text

from longspec.inference.detokenizer import Detokenizer, printable
from longspec.inference.engine.requests import Origin, Tokens
from longspec.inference.stats import GenerationStats, pool

STYLES: dict[Origin, str] = {"target": "", "draft": "#56b4e9", "lookup": "#e69f00"}
"""Sky blue and orange of the Okabe-Ito palette, which color-blind readers can tell apart."""
LEGEND = (
    f"Plain text: the target's own tokens. [{STYLES['draft']}]Blue: accepted tokens of the draft.[/] "
    f"[{STYLES['lookup']}]Orange: those of prompt lookup.[/]"
)


class AnswerStream:
    """Prints each token in the color of its origin."""

    def __init__(self, console: Console, tokenizer: Any, ends_at_once: bool = False) -> None:
        """ends_at_once: whether a SIGINT may interrupt the reading of the prompt."""
        self.console, self.ends_at_once = console, ends_at_once
        self.text = ""
        """The part of the answer that is generated so far."""
        self.ids: list[int] = []
        """Its tokens, the one that ends it included."""
        self.stopped = False
        self._pieces = Detokenizer(tokenizer)

    def take(self, number: int, event: Tokens) -> int | None:
        """Take new tokens (see `Listener`). After a SIGINT, the answer ends before the next one."""
        for count, (token, origin) in enumerate(zip(event.ids, event.origins, strict=True)):
            if self.stopped:
                return count
            self.ids.append(token)
            self._print(self._pieces.add(token), origin)
        return None

    def end(self) -> None:
        """Print what is left of the answer."""
        self._print(self._pieces.held, "target")
        self.console.print()

    def _print(self, piece: str, origin: Origin) -> None:
        if piece:
            self.text += piece
            self.console.print(Text(printable(piece), STYLES[origin]), end="", soft_wrap=True)

    def note_sigint(self, number: int, frame: FrameType | None) -> None:
        """A handler of SIGINT: the first one ends the answer before its next token, and a second one immediately."""
        if self.stopped or (self.ends_at_once and not self.ids):
            raise KeyboardInterrupt
        self.stopped = True


def describe(answers: Sequence[GenerationStats]) -> str:
    """One line of figures for answers."""
    stats = pool(answers)
    parts = [f"{stats.decoded_tokens + len(answers)} tokens"]  # the first one of an answer is not decoded
    if stats.rounds:
        parts += [f"{stats.tokens_per_second:.1f} tokens/s", f"{stats.mean_acceptance_length:.2f} tokens per pass"]
    parts.append(f"first token after {stats.ttft_s / len(answers):.2f} s")
    return ", ".join(parts)
