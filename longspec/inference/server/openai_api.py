"""The requests of OpenAI's API that the server answers, as pydantic models.

A field that is not a field of these models is refused by name, unless it has the value with which it does nothing.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from longspec.data.aligners import ROLES, Turn
from longspec.inference.server.errors import encodable

IGNORED = {"user", "metadata", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"}
"""Fields that never change an answer."""
WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "presence_penalty": (0,),
    "response_format": ({"type": "text"},),
    "store": (False,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
}
"""Fields that are accepted with these values, in addition to null."""


def _one_or_more(value: Any) -> Any:
    """A string as a list of one."""
    return [value] if isinstance(value, str) else value


def _prompts(value: Any) -> list[str | list[int]]:
    """A prompt or a list of prompts as a list. A prompt is text or a list of token ids."""
    # A list that starts with an int is one prompt of token ids. `type`, because True is an int to isinstance.
    prompts = value if isinstance(value, list) and value and type(value[0]) is not int else [value]
    for prompt in prompts:
        is_ids = isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt)
        if not prompt or not (is_ids or isinstance(prompt, str)):
            raise ValueError("must be text, a list of token ids, or a list of such prompts, none of them empty")
        if isinstance(prompt, str):
            _unicode(prompt)
    return prompts


def _unicode(text: str) -> str:
    """The text. Raises ValueError for a lone surrogate, which JSON can escape and no encoding has."""
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError("contains a lone surrogate, which is no text")
    return text


Count = Annotated[int, Field(ge=1)]
Text = Annotated[str, AfterValidator(_unicode)]
Stops = Annotated[list[Text], BeforeValidator(_one_or_more)]
Prompts = Annotated[list[Any], BeforeValidator(_prompts)]


class _Strict(BaseModel):
    """Values are not converted between types, and a field that is null is absent."""

    # A misspelled or unsupported field must not be ignored: the client would take the answer for one that obeys it.
    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _drop_what_does_nothing(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            raise ValueError("must be a JSON object, sent as application/json")
        kept = {}
        for name, value in values.items():
            if name in cls.model_fields:
                if value is not None:  # OpenAI's clients send null for fields that are not set
                    kept[name] = value
            elif name not in IGNORED and value is not None and value not in WITHOUT_EFFECT.get(name, ()):
                field = encodable(str(name)[:64])  # the name is the client's text and goes into the error
                raise PydanticCustomError("unsupported", "not supported by this server", {"field": field})
        return kept


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted for OpenAI's clients; nothing is obfuscated."""


class Extension(_Strict):
    """LongSpec's own options, in the field `longspec`."""

    tokens: bool = False
    """Add a field `longspec` to streamed chunks: tokens with their origins, and each round's tree."""
    speculate: bool = True
    """False decodes one token per round."""
    ignore_eos: bool = False
    """Answers have `max_tokens` tokens; for measurements."""


class _Generation(_Strict):
    model: Text | None = None
    n: Count = 1
    temperature: float = Field(default=1.0, ge=0)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=2**31)
    """0 and -1 keep all tokens."""
    seed: int | None = Field(default=None, ge=0, lt=2**63)
    """Choice i of a request is drawn with seed + i."""
    stop: Stops = []
    """Strings that end an answer; they are not part of it."""
    max_tokens: Count | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    longspec: Extension = Extension()

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage

    @model_validator(mode="after")
    def _check_stream_options(self) -> _Generation:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream")
        return self


class TextPart(_Strict):
    type: Literal["text"]
    text: Text


def _text_parts(value: Any) -> Any:
    """Text as a list of one part."""
    return [{"type": "text", "text": value}] if isinstance(value, str) else value


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[list[TextPart], BeforeValidator(_text_parts)]

    @property
    def turn(self) -> Turn:
        return {"role": ROLES[self.role], "content": "".join(part.text for part in self.content)}


class ChatRequest(_Generation):
    """The body of /v1/chat/completions."""

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: Count | None = None
    logprobs: bool = False
    """Return the log-probability of each token of the answer."""

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs


class CompletionRequest(_Generation):
    """The body of /v1/completions."""

    prompt: Prompts
    """Each is a str or a list[int]."""
    max_tokens: Count | None = 16  # OpenAI's default for this route
    logprobs: Literal[0] | None = None
    """0 returns the log-probability of each token of the answer."""

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None
