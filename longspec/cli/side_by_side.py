"""One question answered by vanilla and by another method, next to each other and while the tokens are generated."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from longspec.cli.pair import LoadedPair, SamplingOptions
from longspec.cli.stream import LEGEND, STYLES, AnswerStream, describe
from longspec.inference.detokenizer import printable
from longspec.inference.origins import Origin

WARM_UP_TOKENS = 4


class AnswerColumn(AnswerStream):
    """Collects an answer and its colors instead of printing it."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__(Console(quiet=True), tokenizer)
        self.shown = Text()

    def _print(self, piece: str, origin: Origin) -> None:
        self.answer.text += piece
        self.shown.append(printable(piece), STYLES[origin])


def side_by_side(
    pair: LoadedPair, question: str, sampling: SamplingOptions, console: Console, method: str
) -> dict[str, Any]:
    """Answer `question` with vanilla, then with `method`. Returns text and wall-clock seconds by method.

    A terminal shows the answers in columns; other output gets a line per answer.
    """
    prompts = pair.encode([[{"role": "user", "content": question}]])
    methods = ("vanilla", method)
    columns: dict[str, AnswerColumn] = {}
    answers: dict[str, dict[str, Any]] = {}

    def table() -> Table:
        shown = Table(*methods, title=question, caption=LEGEND[method], expand=True)
        shown.add_row(*(column.shown for column in columns.values()))
        shown.add_row(*(describe([column.answer]) for column in columns.values()))
        return shown

    with Live(get_renderable=table, console=console) if console.is_terminal else nullcontext():
        for name in methods:
            pair.generate(prompts, SamplingOptions(WARM_UP_TOKENS), method=name)  # builds layers and caches
            columns[name] = AnswerColumn(pair.tokenizer)
            began = time.perf_counter()
            pair.generate(prompts, sampling, method=name, streamer=columns[name])
            answers[name] = {"text": columns[name].answer.text, "seconds": time.perf_counter() - began}
    for name, answer in answers.items():
        text = "" if console.is_terminal else ": " + " ".join(answer["text"].split())
        console.print(f"{name}, {answer['seconds']:.1f} s{text}", markup=False, soft_wrap=True)
    return answers
