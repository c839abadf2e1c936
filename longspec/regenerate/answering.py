"""Answers of a target to the prompts of a shard: a client of the engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from longspec.inference.answering import Listener, answer_all
from longspec.inference.engine.requests import Request, Tokens
from longspec.inference.methods import Drafting
from longspec.inference.request import Sampling, row_seed
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


class Answerer:
    """Answers many prompts with one target."""

    def __init__(self, model: GlideMixin, drafting: Drafting, batch_size: int) -> None:
        """drafting: checked settings. batch_size: largest number of rows; long prompts have as many as fit."""
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
        requests = [
            Request(
                answer.prompt,
                answer.max_new_tokens,
                replace(answer.sampling, seed=row_seed(seed, number)),
                frozenset(stop_ids),
            )
            for number, answer in enumerate(answers)
        ]

        def take(number: int, event: Tokens) -> None:
            answers[number].tokens += event.ids
            progress(len(event.ids), 0)

        answer_all(self.model, self.drafting, requests, self.batch_size, Listener(take, lambda *_: progress(0, 1)))
