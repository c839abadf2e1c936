"""The records of shards: prompts, the target's answers to them, and the reasons to drop some."""

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from longspec.command_line import drafting_of
from longspec.data.aligners import Turn
from longspec.data.prompts import (
    PromptFiles,
    SourcePrompt,
    answered,
    before_loop,
    loops,
    up_to_last_sentence,
    user_turn_marks,
)
from longspec.data.records import Record
from longspec.data.templates import check_embedded, conversation_text, encode_texts
from longspec.inference.answering import answer_all, whole_answers
from longspec.inference.arguments import checked_drafting, end_tokens
from longspec.inference.engine.requests import Request
from longspec.inference.request import Sampling, row_seed
from longspec.models.target_files import position_limit
from longspec.regenerate.settings import Settings, longest_prompt, shard_seed

Done = Callable[[int, list[Record], Counter[str]], object]
"""Called with a complete shard: its number, its records, and how many prompts were dropped for each reason."""
TURN_TEMPERATURE = 1.0
LEAST_START = 32
"""Tokens that an answer must have before a repetition loop, to be kept up to there."""


@dataclass
class _Shard:
    """A shard that is being written."""

    number: int
    rows: range
    dropped: Counter[str] = field(default_factory=Counter)
    """Number of prompts dropped for each reason."""
    prompts: list[SourcePrompt] = field(default_factory=list)
    """Those that are answered."""
    requests: list[Request] = field(default_factory=list)
    """Those for user turns while the target writes them, then those for answers to `prompts`."""
    outcomes: list[Any] = field(default_factory=list)
    """What became of each complete answer: a prompt or a record, or the reason to drop it."""

    def kept(self, use: str) -> list[Any]:
        """Count the reasons to drop an answer, and return the other outcomes in order. use: what the answers are,
        for the names of the counts."""
        self.dropped.update(f"{use}: {outcome}" for outcome in self.outcomes if isinstance(outcome, str))
        return [outcome for outcome in self.outcomes if not isinstance(outcome, str)]


class Writer:
    """Writes shards with one target."""

    def __init__(self, settings: Settings, model: Any, tokenizer: Any, files: PromptFiles | None) -> None:
        """files: None lets the target write the user turns. Raises UserError for limits beyond the target's."""
        self.settings = settings
        self.tokenizer = tokenizer
        self.files = files
        self.family = model.config.model_type
        self.vocab_size = model.config.vocab_size
        self.model, self.drafting = model, checked_drafting(model, drafting_of(settings), False)
        self.stop_ids = sorted(end_tokens(model))
        self.special_ids = set(tokenizer.all_special_ids)
        self.longest_prompt = longest_prompt(settings, position_limit(model.config))
        if files is None:
            # The target continues the chat template's opening of a user turn up to the template's end of it.
            before, after = user_turn_marks(tokenizer)
            self.turn_opening = encode_texts([before], tokenizer)[0]
            check_embedded(self.turn_opening, self.vocab_size, tokenizer, "the chat template's opening of a user turn")
            self.turn_stop_ids = [*self.stop_ids, tokenizer(after, add_special_tokens=False)["input_ids"][0]]

    def write_shards(self, rows: Mapping[int, range], done: Done, progress: Callable[[int], object]) -> None:
        """Write some shards. rows: the numbers of their prompts. progress: called with the number of finished ones."""
        shards = [_Shard(number, own) for number, own in rows.items()]
        if self.files is None:
            self._write_turns(shards)
        else:
            for shard in shards:
                rejected: list[str] = []
                chat = self.family, self.tokenizer, self.settings.chat_format
                shard.prompts = list(self.files.read(shard.rows.start, shard.rows.stop, *chat, rejected))
                shard.dropped["prompts: rejected by the chat template"] = len(rejected)
        for shard in shards:
            self._begin_answers(shard)
            progress(len(shard.rows) - len(shard.requests))  # dropped without an answer
            if not shard.requests:
                done(shard.number, [], shard.dropped)
        left = {shard.number: len(shard.requests) for shard in shards}

        def finish(shard: _Shard, row: int, answer: list[int]) -> None:
            shard.outcomes[row] = self._record(shard.prompts[row], shard.requests[row], answer)
            progress(1)
            left[shard.number] -= 1
            if not left[shard.number]:
                done(shard.number, shard.kept("answers"), shard.dropped)
                shard.outcomes = []  # frees memory while other shards go on

        self._answer(shards, finish, self.settings.shard_size)

    def _answer(
        self, shards: Sequence[_Shard], finish: Callable[[_Shard, int, list[int]], object], window: int | None = None
    ) -> None:
        """Answer the requests of all shards. finish: called with the shard, the number and the tokens of each complete
        answer, while others are decoded."""
        owners = [(shard, row) for shard in shards for row in range(len(shard.requests))]
        requests = [shard.requests[row] for shard, row in owners]
        listener = whole_answers(lambda number, answer, stats: finish(*owners[number], answer))
        answer_all(self.model, self.drafting, requests, self.settings.batch_size, listener, window=window)

    def _write_turns(self, shards: Sequence[_Shard]) -> None:
        """Prompts whose user turns the target writes."""
        for shard in shards:
            asked = [(self.turn_opening, TURN_TEMPERATURE)] * len(shard.rows)
            self._request(shard, "turns", asked, self.settings.max_turn_tokens, self.turn_stop_ids)

        def finish(shard: _Shard, row: int, answer: list[int]) -> None:
            shard.outcomes[row] = self._prompt(shard.rows[row], answer)

        self._answer(shards, finish)
        for shard in shards:
            shard.prompts = shard.kept("user turns")

    def _prompt(self, row: int, answer: list[int]) -> SourcePrompt | str:
        """A prompt whose user turn the target wrote, or the reason to drop it."""
        content, reason = self._text(answer, self.turn_stop_ids)
        if not reason and answer[-1] not in self.turn_stop_ids:
            content = up_to_last_sentence(content)
            reason = None if content else "cut off"
        if reason:
            return reason
        turns: list[Turn] = [{"role": "user", "content": content}]
        text = conversation_text(turns, self.family, self.tokenizer, self.settings.chat_format)
        return SourcePrompt(f"{self.settings.split}-{row}", turns, text)

    def _begin_answers(self, shard: _Shard) -> None:
        """Keep the prompts that can be answered."""
        prompts, dropped = shard.prompts, shard.dropped
        # Every prompt draws a temperature, also one that is dropped, so that draws do not depend on lengths.
        generator = random.Random(shard_seed(self.settings, shard.number, "temperatures"))
        temperatures = [generator.choice(self.settings.temperatures) for _ in prompts]
        token_ids = encode_texts([prompt.text for prompt in prompts], self.tokenizer)
        fitting = [row for row, ids in enumerate(token_ids) if 0 < len(ids) <= self.longest_prompt]
        dropped["prompts: too long or empty"] += len(prompts) - len(fitting)
        # A tokenizer may have more tokens than its target.
        kept = [row for row in fitting if max(token_ids[row]) < self.vocab_size]
        dropped["prompts: with a token that has no embedding"] += len(fitting) - len(kept)
        shard.prompts = [prompts[row] for row in kept]
        asked = [(token_ids[row], temperatures[row]) for row in kept]
        self._request(shard, "answers", asked, self.settings.max_new_tokens, self.stop_ids)

    def _request(
        self, shard: _Shard, use: str, asked: Sequence[tuple[list[int], float]], limit: int, stop_ids: Sequence[int]
    ) -> None:
        """Set a shard's requests. asked: prompts and temperatures. limit: longest answer, in tokens."""
        penalties = self.settings.penalties(self.tokenizer, self.vocab_size, stop_ids)
        seed = shard_seed(self.settings, shard.number, use)
        shard.requests = []
        for row, (prompt, temperature) in enumerate(asked):
            sampling = Sampling(temperature, seed=row_seed(seed, row), **self.settings.filters, **penalties)
            shard.requests.append(Request(prompt, limit, sampling, frozenset(stop_ids)))
        shard.outcomes = [None] * len(shard.requests)

    def _record(self, prompt: SourcePrompt, request: Request, answer: list[int]) -> Record | str:
        """The record of an answer, or the reason to drop it."""
        text, reason = self._text(answer, self.stop_ids)
        if reason == "loops":  # the start is still good training text
            answer = before_loop([token for token in answer if token not in self.stop_ids])
            if len(answer) >= LEAST_START:
                text, reason = self._text(answer, self.stop_ids)
        if reason:
            return reason
        return answered(
            prompt,
            text,
            temperature=request.sampling.temperature,
            finished=answer[-1] in self.stop_ids,
            new_tokens=len(answer),
        )

    def _text(self, answer: list[int], stop_ids: list[int]) -> tuple[str, str | None]:
        """The text of an answer, and the reason to drop it, if there is one."""
        # A special token inside a text would end or open a turn where the text is trained on.
        if not (self.special_ids - set(stop_ids)).isdisjoint(answer):
            return "", "special tokens"
        if loops(answer):
            return "", "loops"
        # The stop token comes from the chat format again.
        tokens = answer[:-1] if answer[-1] in stop_ids else answer
        text = self.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        # A text that reached its limit may end inside a character.
        text = text.rstrip("\ufffd") if text.strip() else ""
        return text, None if text else "empty"
