"""The model that a server answers for: its names, its tokenizer, and how it reads prompts."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

from transformers import GenerationConfig

from longspec.data.records import RecordError
from longspec.errors import UserError
from longspec.inference.arguments import check_sampling
from longspec.inference.engine.requests import Request
from longspec.inference.request import FILTERS, Sampling
from longspec.inference.server.errors import TOO_LONG, ApiError
from longspec.inference.server.limits import Limits
from longspec.inference.server.openai_api import ChatRequest, CompletionRequest
from longspec.inference.token_options import TOKEN_OPTIONS, check_option, token_settings, with_word_ids

SETTINGS: dict[str, Any] = {"temperature": 1.0, **FILTERS, **TOKEN_OPTIONS}
"""The settings of a request that a generation config may have, with the values of the target's own distribution."""
DEFAULT_NEW_TOKENS = 1024
"""Limit of a chat answer if neither its request nor the generation config sets one."""


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
    config: GenerationConfig = field(default_factory=GenerationConfig)
    """Settings of requests that name none. As in vLLM, `do_sample` has no influence."""

    def __post_init__(self) -> None:
        """Raises UserError for a value of the generation config that is of a wrong type or outside its range."""
        try:
            check_option("max_new_tokens", self.config.max_new_tokens or 1)
            self.sampling({}, self.stop_ids)
        except UserError as error:
            raise UserError(f"generation_config.{error}; correct the file, or use --generation_config none") from error

    @property
    def described_defaults(self) -> str:
        """A line on the settings of requests that name none."""
        values = self._settings({})
        shown = {name: value for name, value in values.items() if name == "temperature" or value != SETTINGS[name]}
        return f"{', '.join(f'{name} {shorten(str(value), 60)}' for name, value in shown.items())} by default"

    def _settings(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """The value of each of SETTINGS: the given one, else that of the generation config, else the neutral one."""
        values = {name: given.get(name, getattr(self.config, name, None)) for name in SETTINGS}
        values["top_k"] = 0 if values["top_k"] == -1 else values["top_k"]  # vLLM's value that keeps all tokens
        return {name: SETTINGS[name] if value is None else value for name, value in values.items()}

    def sampling(
        self, given: Mapping[str, Any], stop_ids: frozenset[int], prompt_length: int = 0, seed: int | None = None
    ) -> Sampling:
        """The settings of a request that sets the given ones. Raises UserError that starts with a setting's name."""
        values = self._settings(with_word_ids(given, self.tokenizer))
        own = {name: values.pop(name) for name in ("temperature", *FILTERS)}
        check_sampling(1, **own)
        return Sampling(**own, seed=seed, **token_settings(values, stop_ids, self.vocab_size, prompt_length))

    def requests(self, body: ChatRequest | CompletionRequest, limits: Limits) -> list[Request]:
        """The scheduler's requests, `n` per prompt, prompt by prompt. Raises ApiError."""
        if body.model not in (None, self.name):
            raise ApiError(404, f"the model '{body.model}' is not served here, only '{self.name}'", "model")
        choices = body.n * (len(body.prompt) if isinstance(body, CompletionRequest) else 1)
        if choices > limits.max_choices:
            raise ApiError(400, f"n: {choices} is above this server's limit of {limits.max_choices}", "n")
        stop_ids = frozenset() if body.longspec.ignore_eos else self.stop_ids
        given = body.model_dump(include={*SETTINGS, "bad_words"}, exclude_none=True)
        seeds = [None if body.seed in (None, -1) else body.seed + index for index in range(body.n)]
        try:
            return [
                Request(
                    prompt,
                    self._new_tokens(prompt, body.token_limit),
                    self.sampling(given, stop_ids, len(prompt), seed),
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
        except UserError as error:
            raise ApiError(400, str(error), str(error).partition(":")[0]) from error  # it starts with the field's name

    def _prompts(self, body: ChatRequest | CompletionRequest) -> list[list[int]]:
        if isinstance(body, CompletionRequest):
            return [prompt if isinstance(prompt, list) else self.encode([prompt])[0] for prompt in body.prompt]
        variables = {name: value for name, value in body.chat_template_kwargs.items() if value is not None}
        turns, field = [message.turn for message in body.messages], "messages"
        try:
            return self.encode([turns], variables)
        except RecordError as error:  # the chat template fails
            with suppress(RecordError):
                self.encode([turns])
                field = "chat_template_kwargs"  # without which it does not
            raise ApiError(400, f"{field}: {error}", field) from error

    def _new_tokens(self, prompt: list[int], limit: int | None) -> int:
        """The answer's token limit: that of the request, else the room that is left, up to the server's default. The
        engine refuses a limit above this room. Raises ApiError if there is none."""
        room = self.positions - len(prompt)
        if room < 1:
            problem = f"leaves no room for an answer in the {self.positions} positions of a row"
            raise ApiError(400, f"prompt of {len(prompt)} tokens: {problem}", code=TOO_LONG)
        if limit is None:
            limit = min(self.config.max_new_tokens or DEFAULT_NEW_TOKENS, room)
        elif limit == -1:
            limit = room
        return max(limit, 1)  # of an answer of 0 tokens, the engine makes the first one
