"""Answers of a target to many prompts: a client of the engine."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

from longspec.errors import UserError
from longspec.inference.methods import Drafting
from longspec.inference.prefill import PREFILL_TOKENS
from longspec.inference.request import Sampling, row_seed
from longspec.inference.request_engine import RequestEngine
from longspec.inference.server.requests import Event, Finished, Request
from longspec.models.glide import GlideMixin

Progress = Callable[[int, int], None]
"""Called with the number of new tokens and of finished answers since the last call."""


@dataclass
class Answer:
    """A prompt and the answer to it."""

    prompt: list[int]
    sampling: Sampling
    max_new_tokens: int
    tokens: list[int] = field(default_factory=list)

    @property
    def longest(self) -> int:
        return len(self.prompt) + self.max_new_tokens


class Answerer:
    """Answers many prompts with one target."""

    def __init__(self, model: GlideMixin, drafting: Drafting, batch_size: int) -> None:
        """batch_size: largest number of rows; long prompts have as many as fit into memory."""
        self.model = model
        self.drafting = drafting
        self.batch_size = batch_size

    def complete(
        self, answers: Sequence[Answer], stop_ids: Sequence[int], seed: int, progress: Progress = lambda *_: None
    ) -> None:
        """Complete the answers in place, each up to and including its first stop id, or up to its limit.

        Answer i has the seed `row_seed(seed, i)`, so on the same kind of device it does not depend on the others.
        Raises UserError, with the prompt and the position, for logits that are NaN or infinite.
        """
        # The longest first, so that no long answer runs alone at the end.
        waiting = sorted(enumerate(answers), key=lambda numbered: numbered[1].longest, reverse=True)
        while waiting:
            rows, longest = min(self.batch_size, len(waiting)), waiting[0][1].longest
            engine = RequestEngine(self.model, self.drafting, rows, None, longest, PREFILL_TOKENS)
            # All rows have the capacity of the longest answer. If memory is short, shorter ones come with more rows.
            shortest = 0 if engine.batch.max_rows == rows else longest // 2
            own = [numbered for numbered in waiting if numbered[1].longest >= shortest]
            waiting = waiting[len(own) :]
            failures: list[str] = []
            for number, answer in own:
                sampling = replace(answer.sampling, seed=row_seed(seed, number))
                request = Request(answer.prompt, answer.max_new_tokens, sampling, frozenset(stop_ids))
                engine.add(request, partial(_take, number, answer, progress, failures))
            while engine.step() and not failures:
                pass
            engine.close()
            if failures:
                raise UserError(failures[0])
            del engine
            gc.collect()  # its memory is free for the next one


def _take(number: int, answer: Answer, progress: Progress, failures: list[str], event: Event) -> None:
    if not isinstance(event, Finished):
        answer.tokens += event.ids
        progress(len(event.ids), 0)
    elif event.reason == "error":
        failures.append(f"prompt {number}, {event.message}")
    else:
        progress(0, 1)
