"""The model that a server answers for: its names, its tokenizer, and how it reads prompts."""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from longspec.errors import UserError
from longspec.inference.engine.requests import Request
from longspec.inference.request import FILTERS, Sampling
from longspec.inference.server.errors import ApiError, encodable
from longspec.inference.server.limits import Limits
from longspec.inference.server.openai_api import ChatRequest, CompletionRequest
from longspec.inference.server.sampling_defaults import WITHOUT_CONFIG, SamplingDefaults
from longspec.inference.token_options import TOKEN_OPTIONS, token_settings, word_ids

FIELDS = {"min_new_tokens": "min_tokens"}
"""Fields of requests with other names than the options."""


@dataclass(frozen=True)
class ServedModel:
    name: str
    """The id in /v1/models."""
    method: str
    """How tokens are proposed."""
    tokenizer: Any
    encode: Callable[..., list[list[int]]]
    """Token ids of a list[str | list[Turn]]: texts are encoded as they are, conversations in the chat format. A second
    argument sets variables of the chat template. Raises UserError."""
    stop_ids: frozenset[int]
    positions: int
    """Number of tokens that a prompt and its answer may have together."""
    vocab_size: int
    defaults: SamplingDefaults = WITHOUT_CONFIG
    """Settings of requests that name none."""

    @property
    def usual(self) -> Sampling:
        """The penalties of requests that name none."""
        return Sampling(**token_settings(self.defaults.token_options, self.stop_ids, self.vocab_size))

    def requests(self, body: ChatRequest | CompletionRequest, limits: Limits) -> list[Request]:
        """The scheduler's requests, `n` per prompt, prompt by prompt. Raises ApiError."""
        self._check(body, limits)
        stop_ids = frozenset() if body.longspec.ignore_eos else self.stop_ids
        seeds = [None if body.seed is None else body.seed + index for index in range(body.n)]
        return [
            Request(
                prompt,
                self._new_tokens(prompt, body, limits),
                replace(self._sampling(body, stop_ids, len(prompt)), seed=seed),
                stop_ids,
                speculate=body.longspec.speculate,
                logprobs=body.alternatives is not None,
                alternatives=body.alternatives or 0,
                scores_prompt=body.alternatives is not None and body.echoed is not None,
                trace=body.longspec.tokens,
            )
            for prompt in self._prompts(body)
            for seed in seeds
        ]

    def ignored(self, body: ChatRequest | CompletionRequest) -> Iterator[str]:
        """The names of the fields that have no effect."""
        yield from body.ignored()
        if isinstance(body, ChatRequest):
            given = {name for name, value in body.chat_template_kwargs.items() if value is not None}
            unused = given - self._template_variables(body).keys()
            yield from (f"chat_template_kwargs.{encodable(name)}" for name in sorted(unused))

    def _template_variables(self, body: ChatRequest) -> dict[str, Any]:
        """The variables of a request that the chat template has."""
        words = set(re.findall(r"\w+", str(self.tokenizer.chat_template)))
        given = body.chat_template_kwargs.items()
        return {name: value for name, value in given if value is not None and name in words and name.isidentifier()}

    def _sampling(
        self, body: ChatRequest | CompletionRequest, stop_ids: frozenset[int], prompt_length: int
    ) -> Sampling:
        given = {name: getattr(body, FIELDS.get(name, name), None) for name in TOKEN_OPTIONS}
        options = {**self.defaults.token_options, **{name: x for name, x in given.items() if x is not None}}
        try:
            if body.bad_words is not None:
                options["bad_words_ids"] = [*(body.bad_words_ids or []), *word_ids(body.bad_words, self.tokenizer)]
            penalties = token_settings(options, stop_ids, self.vocab_size, prompt_length)
        except UserError as error:
            raise ApiError(400, str(error), str(error).partition(":")[0]) from error  # it starts with the field's name
        own = {name: value for name in ("temperature", *FILTERS) if (value := getattr(body, name)) is not None}
        if "top_k" in own:
            own["top_k"] = max(0, own["top_k"])
        return replace(self.defaults.sampling, **own, **penalties)

    def _check(self, body: ChatRequest | CompletionRequest, limits: Limits) -> None:
        if body.model not in (None, self.name):
            raise ApiError(404, f"the model '{body.model}' is not served here, only '{self.name}'", "model")
        messages = len(body.messages) if isinstance(body, ChatRequest) else 0
        prompts = 1 if isinstance(body, ChatRequest) else len(body.prompt)
        for name, size, most in (
            ("messages", messages, limits.max_messages),
            ("n", prompts * body.n, limits.max_choices),
            ("stop", len(body.stop), limits.max_stops),
            ("stop", max(map(len, body.stop), default=0), limits.max_stop_characters),
        ):
            if size > most:
                raise ApiError(400, f"{name}: {size} is above this server's limit of {most}", name)

    def _prompts(self, body: ChatRequest | CompletionRequest) -> list[list[int]]:
        if isinstance(body, ChatRequest):
            field = "messages"
            try:
                turns = [message.turn for message in body.messages]
                variables = self._template_variables(body)
                prompts = self.encode([turns], variables) if variables else self.encode([turns])
            except UserError as error:  # the chat template fails, or a variable has no such value
                field = "chat_template_kwargs" if str(error).startswith("chat_template_kwargs") else "messages"
                raise ApiError(400, str(error) if field in str(error) else f"{field}: {error}", field) from error
        else:
            field = "prompt"
            prompts = [prompt if isinstance(prompt, list) else self.encode([prompt])[0] for prompt in body.prompt]
        # Ids come from the client or from added tokens; one without an embedding would read foreign memory on a GPU.
        for prompt in prompts:
            if not prompt:
                raise ApiError(400, f"{field}: the tokenizer makes no token of this text", field)
            self.check_ids(prompt, field)
        return prompts

    def check_ids(self, tokens: list[int], field: str) -> None:
        """Raise ApiError for a token id outside of the vocabulary. field: where the client put it."""
        for token in (min(tokens, default=0), max(tokens, default=0)):
            if not 0 <= token < self.vocab_size:
                raise ApiError(400, f"{field}: token {token}; the vocabulary has {self.vocab_size}", field)

    def _new_tokens(self, prompt: list[int], body: ChatRequest | CompletionRequest, limits: Limits) -> int:
        """The answer's token limit: that of the request, else the room that is left, up to the server's default."""
        room = self.positions - len(prompt)
        default = min(self.defaults.max_new_tokens or limits.default_new_tokens, room)
        new_tokens = 1 if body.drops_answer else body.token_limit or default
        if new_tokens == -1:
            new_tokens = room
        if new_tokens > room or room < 1:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens and the answer up to {max(new_tokens, 1)}; "
                f"this server has room for {self.positions} tokens per request",
                "messages" if isinstance(body, ChatRequest) else "prompt",
                "context_length_exceeded",
            )
        return new_tokens
