"""The model that a server answers for: its names, its tokenizer, and how it reads prompts."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from longspec.errors import UserError
from longspec.inference.engine.requests import Request
from longspec.inference.request import FILTERS, Sampling
from longspec.inference.server.errors import ApiError
from longspec.inference.server.limits import Limits
from longspec.inference.server.openai_api import ChatRequest, CompletionRequest
from longspec.inference.server.sampling_defaults import SamplingDefaults
from longspec.inference.token_options import TOKEN_OPTIONS, token_settings, with_word_ids


@dataclass(frozen=True)
class ServedModel:
    name: str
    """The id in /v1/models."""
    method: str
    """How tokens are proposed."""
    tokenizer: Any
    encode: Callable[..., list[list[int]]]
    """Token ids of a list[str | list[Turn]]: texts are encoded as they are, conversations in the chat format. A second
    argument has variables of the chat template. Raises UserError."""
    stop_ids: frozenset[int]
    positions: int
    """Number of tokens that a prompt and its answer may have together."""
    vocab_size: int
    defaults: SamplingDefaults = field(default_factory=SamplingDefaults)
    """Settings of requests that name none."""

    @property
    def usual(self) -> Sampling:
        """The penalties of requests that name none."""
        return Sampling(**token_settings(self.defaults.token_options, self.stop_ids, self.vocab_size))

    def requests(self, body: ChatRequest | CompletionRequest, limits: Limits) -> list[Request]:
        """The scheduler's requests, `n` per prompt, prompt by prompt. Raises ApiError."""
        if body.model not in (None, self.name):
            raise ApiError(404, f"the model '{body.model}' is not served here, only '{self.name}'", "model")
        choices = body.n * (len(body.prompt) if isinstance(body, CompletionRequest) else 1)
        if choices > limits.max_choices:
            raise ApiError(400, f"n: {choices} is above this server's limit of {limits.max_choices}", "n")
        stop_ids = frozenset() if body.longspec.ignore_eos else self.stop_ids
        seeds = [None if body.seed in (None, -1) else body.seed + index for index in range(body.n)]
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

    def _sampling(
        self, body: ChatRequest | CompletionRequest, stop_ids: frozenset[int], prompt_length: int
    ) -> Sampling:
        names = (*TOKEN_OPTIONS, "bad_words", "temperature", *FILTERS)
        given = {name: value for name in names if (value := getattr(body, name, None)) is not None}
        own = {name: given.pop(name) for name in ("temperature", *FILTERS) if name in given}
        if own.get("top_k") == -1:
            own["top_k"] = 0
        try:
            options = {**self.defaults.token_options, **with_word_ids(given, self.tokenizer)}
            penalties = token_settings(options, stop_ids, self.vocab_size, prompt_length)
        except UserError as error:
            raise ApiError(400, str(error), str(error).partition(":")[0]) from error  # it starts with the field's name
        return replace(self.defaults.sampling, **own, **penalties)

    def _prompts(self, body: ChatRequest | CompletionRequest) -> list[list[int]]:
        if isinstance(body, ChatRequest):
            field = "messages"
            variables = {name: value for name, value in body.chat_template_kwargs.items() if value is not None}
            try:
                prompts = self.encode([[message.turn for message in body.messages]], variables)
            except UserError as error:  # the chat template fails
                raise ApiError(400, f"{field}: {error}", field) from error
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
        new_tokens = body.token_limit
        if new_tokens is None:
            new_tokens = min(self.defaults.max_new_tokens or limits.default_new_tokens, room)
        elif new_tokens == -1:
            new_tokens = room
        new_tokens = max(new_tokens, 1)  # of an answer of 0 tokens, the engine makes the first one
        if new_tokens > room:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens and the answer up to {new_tokens}; "
                f"this server has room for {self.positions} tokens per request",
                "messages" if isinstance(body, ChatRequest) else "prompt",
                "context_length_exceeded",
            )
        return new_tokens
