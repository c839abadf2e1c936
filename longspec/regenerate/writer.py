"""The records of a shard: prompts, the target's answers to them, and the reasons to drop some."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from longspec.data.aligners import Turn
from longspec.data.prompts import PromptFiles, SourcePrompt, answered, conversation_text, loops, user_turn_marks
from longspec.data.records import Record
from longspec.data.templates import check_embedded, encode_texts
from longspec.errors import UserError
from longspec.inference.answering import Listener, answer_all
from longspec.inference.arguments import end_tokens
from longspec.inference.engine.requests import Request, Tokens
from longspec.inference.methods import Drafting
from longspec.inference.request import Sampling, row_seed
from longspec.models.glide import GlideMixin
from longspec.models.target_files import position_limit
from longspec.regenerate.settings import Settings, shard_seed

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


TURN_TEMPERATURE = 1.0
"""Temperature of user turns that the target writes."""


class Writer:
    """Writes shards with one target."""

    def __init__(self, settings: Settings, model: Any, tokenizer: Any, files: PromptFiles | None) -> None:
        """files: None lets the target write the user turns. Raises UserError for limits beyond the target's."""
        self.settings = settings
        self.tokenizer = tokenizer
        self.files = files
        self.family = model.config.model_type
        self.vocab_size = model.config.vocab_size
        self.answerer = Answerer(model, settings.drafting(model), settings.batch_size)
        self.stop_ids = sorted(end_tokens(model.generation_config.eos_token_id))
        self.special_ids = set(tokenizer.all_special_ids)

        max_positions = position_limit(model.config)

        # Prompt and longest answer must fit the target together.
        self.longest_prompt = settings.max_prompt_tokens or max_positions - settings.max_new_tokens
        if self.longest_prompt < 1 or self.longest_prompt + settings.max_new_tokens > max_positions:
            raise UserError(
                f"max_prompt_tokens {self.longest_prompt} + max_new_tokens {settings.max_new_tokens}: "
                f"the target has {max_positions} positions"
            )
        if files is None:
            # The target continues the chat template's opening of a user turn up to the template's end of it.
            before, after = user_turn_marks(tokenizer)
            self.turn_opening = encode_texts([before], tokenizer)[0]
            check_embedded(self.turn_opening, self.vocab_size, tokenizer, "the chat template's opening of a user turn")
            self.turn_stop_ids = [*self.stop_ids, tokenizer(after, add_special_tokens=False)["input_ids"][0]]

    def write_shard(self, shard: int, rows: range, progress: Progress) -> tuple[list[Record], Counter[str]]:
        """The records of a shard, whose prompts have the numbers `rows`, and how many were dropped for each reason."""
        dropped: Counter[str] = Counter()
        if self.files is None:
            prompts = self._write_turns(shard, rows, dropped, progress)
        else:
            rejected: list[str] = []
            chat_format = self.settings.chat_format
            prompts = self.files.read(rows.start, rows.stop, self.family, self.tokenizer, chat_format, rejected)
            if rejected:
                dropped["prompts: rejected by the chat template"] = len(rejected)
        return self._answer(shard, prompts, dropped, progress), dropped

    def _write_turns(self, shard: int, rows: range, dropped: Counter[str], progress: Progress) -> list[SourcePrompt]:
        """Prompts whose user turns the target writes."""
        penalties = self.settings.penalties(self.tokenizer, self.vocab_size, self.turn_stop_ids)
        sampling = self.settings.sampling(TURN_TEMPERATURE, penalties)
        answers = [Answer(self.turn_opening, sampling, self.settings.max_turn_tokens) for _ in rows]
        seed = shard_seed(self.settings, shard, "turns")
        # Only answers count as finished prompts.
        self.answerer.complete(answers, self.turn_stop_ids, seed, lambda tokens, finished: progress(tokens, 0))

        prompts = []
        for row, answer in zip(rows, answers, strict=True):
            # A user turn without its end is no question; a cut answer is still good training text.
            is_cut_off = answer.tokens[-1] not in self.turn_stop_ids
            reason = "cut off" if is_cut_off else self._defect(answer, self.turn_stop_ids)
            if reason:
                dropped[f"user turns: {reason}"] += 1
                continue
            turns: list[Turn] = [{"role": "user", "content": self._text(answer, self.turn_stop_ids)}]
            text = conversation_text(turns, self.family, self.tokenizer, self.settings.chat_format)
            prompts.append(SourcePrompt(f"{self.settings.split}-{row}", turns, text))
        return prompts

    def _answer(
        self, shard: int, prompts: list[SourcePrompt], dropped: Counter[str], progress: Progress
    ) -> list[Record]:
        """The records of the answers that are kept."""
        # Every prompt draws a temperature, also one that is dropped, so that draws do not depend on lengths.
        generator = random.Random(shard_seed(self.settings, shard, "temperatures"))
        temperatures = [generator.choice(self.settings.temperatures) for _ in prompts]
        token_ids = encode_texts([prompt.text for prompt in prompts], self.tokenizer)
        fitting = [row for row, ids in enumerate(token_ids) if 0 < len(ids) <= self.longest_prompt]
        dropped["prompts: too long or empty"] += len(prompts) - len(fitting)
        # A tokenizer may have more tokens than its target.
        kept = [row for row in fitting if max(token_ids[row]) < self.vocab_size]
        dropped["prompts: with a token that has no embedding"] += len(fitting) - len(kept)

        penalties = self.settings.penalties(self.tokenizer, self.vocab_size, self.stop_ids)
        samplings = [self.settings.sampling(temperature, penalties) for temperature in temperatures]
        answers = [Answer(token_ids[row], samplings[row], self.settings.max_new_tokens) for row in kept]
        seed = shard_seed(self.settings, shard, "answers")
        self.answerer.complete(answers, self.stop_ids, seed, progress)

        records = []
        for row, answer in zip(kept, answers, strict=True):
            if reason := self._defect(answer, self.stop_ids):
                dropped[f"answers: {reason}"] += 1
                continue
            record = answered(
                prompts[row],
                self._text(answer, self.stop_ids),
                temperature=answer.sampling.temperature,
                finished=answer.tokens[-1] in self.stop_ids,
                new_tokens=len(answer.tokens),
            )
            records.append(record)
        return records

    def _defect(self, answer: Answer, stop_ids: list[int]) -> str | None:
        """The reason to drop a text; None for a good one."""
        # A special token inside a text would end or open a turn where the text is trained on.
        if (self.special_ids - set(stop_ids)) & set(answer.tokens):
            return "special tokens"
        if loops(answer.tokens):
            return "loops"
        return None if self._text(answer, stop_ids) else "empty"

    def _text(self, answer: Answer, stop_ids: list[int]) -> str:
        # The stop token comes from the chat format again.
        tokens = answer.tokens[:-1] if answer.tokens[-1] in stop_ids else answer.tokens
        text = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        if not text.strip():
            return ""
        return text.rstrip("\ufffd")  # a text that reached its limit may end inside a character
