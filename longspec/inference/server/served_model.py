"""The model that a server answers for: its names, its tokenizer, and how it reads prompts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from longspec.data.aligners import Turn
from longspec.errors import UserError
from longspec.inference.request import Sampling
from longspec.inference.server.errors import ApiError
from longspec.inference.server.limits import Limits
from longspec.inference.server.openai_api import ChatRequest, CompletionRequest
from longspec.inference.server.requests import Request


@dataclass(frozen=True)
class ServedModel:
    name: str
    """The id in /v1/models."""
    method: str
    """How tokens are proposed."""
    tokenizer: Any
    encode: Callable[[list[str | list[Turn]]], list[list[int]]]
    """Token ids of texts, which are encoded as they are, and of conversations in the chat format."""
    stop_ids: frozenset[int]
    positions: int
    """Number of tokens that a prompt and its answer may have together."""
    vocab_size: int

    def requests(self, body: ChatRequest | CompletionRequest, limits: Limits) -> list[Request]:
        """The scheduler's requests, `n` per prompt, prompt by prompt. Raises ApiError."""
        self._check(body, limits)
        sampling = [
            Sampling(body.temperature, body.top_p, max(0, body.top_k), None if body.seed is None else body.seed + index)
            for index in range(body.n)
        ]
        return [
            Request(
                prompt,
                self._new_tokens(prompt, body, limits),
                choice,
                frozenset() if body.longspec.ignore_eos else self.stop_ids,
                speculate=body.longspec.speculate,
                logprobs=body.wants_logprobs,
                trace=body.longspec.tokens,
            )
            for prompt in self._prompts(body)
            for choice in sampling
        ]

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
            try:
                return self.encode([[message.turn for message in body.messages]])
            except UserError as error:  # the chat template refuses the roles
                raise ApiError(400, f"messages: {error}", "messages") from error
        prompts = [prompt if isinstance(prompt, list) else self.encode([prompt])[0] for prompt in body.prompt]
        # Token ids come from the client; one outside of the vocabulary would read foreign memory on a GPU.
        for prompt in prompts:
            if not prompt:
                raise ApiError(400, "prompt: the tokenizer makes no token of this text", "prompt")
            if max(prompt) >= self.vocab_size:
                raise ApiError(400, f"prompt: token {max(prompt)}; the vocabulary has {self.vocab_size}", "prompt")
        return prompts

    def _new_tokens(self, prompt: list[int], body: ChatRequest | CompletionRequest, limits: Limits) -> int:
        """The answer's token limit: that of the request, else the room that is left, up to `default_new_tokens`."""
        room = self.positions - len(prompt)
        new_tokens = body.token_limit or min(limits.default_new_tokens, room)
        if new_tokens > room or room < 1:
            raise ApiError(
                400,
                f"the prompt has {len(prompt)} tokens and the answer up to {max(new_tokens, 1)}; "
                f"this server has room for {self.positions} tokens per request",
                "messages" if isinstance(body, ChatRequest) else "prompt",
                "context_length_exceeded",
            )
        return new_tokens
