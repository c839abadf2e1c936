"""The requests of OpenAI's API that the server answers, as pydantic models.

`known_fields` lists the fields of other servers that are accepted or refused; all others are ignored and named.
"""

from collections.abc import Iterator, Set
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from longspec.data.aligners import ROLES, Turn
from longspec.inference.engine.requests import MOST_ALTERNATIVES
from longspec.inference.server import known_fields as known
from longspec.inference.server.errors import encodable
from longspec.inference.token_options import BIAS_RANGE, MOST_NGRAM, PENALTY_RANGE, REPETITION_RANGE

NOT_SUPPORTED = "not supported by this server; leave it out"
NAME_CHARACTERS = 64
"""Longest part of a field's name that a response repeats."""


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


def _template_value(value: Any) -> Any:
    if isinstance(value, str):
        return _unicode(value)
    if not isinstance(value, bool | int | float | None):
        raise ValueError("must be true, false, a number or text")
    return value


def _token_limit(value: int) -> int:
    if value < 1 and value != -1:
        raise ValueError("should be greater than or equal to 1, or -1 for all the room that is left")
    return value


Count = Annotated[int, Field(ge=1)]
TokenLimit = Annotated[int, AfterValidator(_token_limit)]
Text = Annotated[str, AfterValidator(_unicode)]
TokenId = Annotated[int, Field(ge=0)]
Penalty = Annotated[float, Field(ge=PENALTY_RANGE[0], le=PENALTY_RANGE[1])]
Bias = Annotated[float, Field(ge=BIAS_RANGE[0], le=BIAS_RANGE[1])]
Stops = Annotated[list[Text], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
TemplateValue = Annotated[Any, AfterValidator(_template_value)]
Prompts = Annotated[list[Any], BeforeValidator(_prompts)]


class Strict(BaseModel):
    """Values are not converted between types. A field that is null or empty is absent."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())
    hints: ClassVar[Set[str]] = frozenset()
    """Further fields that never change an answer."""
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Further fields that would change the answer, and the values at which they do nothing."""
    is_closed: ClassVar[bool] = False
    """Whether unknown fields are refused."""
    other_names: ClassVar[dict[str, str]] = {}
    """Other names of fields."""

    @model_validator(mode="before")
    @classmethod
    def _drop_what_does_nothing(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            raise ValueError("must be a JSON object, sent as application/json")
        kept = {}
        for name, value in values.items():
            name = encodable(str(name))  # pydantic takes no lone surrogates
            if (field_name := cls.other_names.get(name)) is not None and values.get(field_name) in known.UNSET:
                name = field_name
            own = cls.model_fields.get(name)
            if own is not None and own.is_required():
                kept[name] = value
            elif value in known.UNSET:
                continue
            elif own is None and (
                not known.does_nothing(value, cls.neutral[name]) if name in cls.neutral else cls.is_closed
            ):
                # A client that takes the answer for one that obeys the field would be misled.
                field = {"field": name[:NAME_CHARACTERS]}
                raise PydanticCustomError("unsupported", NOT_SUPPORTED, field)
            elif own is not None or not (name in cls.hints or name in cls.neutral):
                kept[name] = value
        return kept

    def ignored(self) -> Iterator[str]:
        """The names of the fields that have no effect here, with those of nested models."""
        yield from self.model_extra or ()
        for name in type(self).model_fields:
            value = getattr(self, name)
            for inner in value if isinstance(value, list) else [value]:
                if isinstance(inner, Strict):
                    yield from (f"{name}.{field}" for field in inner.ignored())


class StreamOptions(Strict):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Accepted for OpenAI's clients; nothing is obfuscated."""


class Extension(Strict):
    """LongSpec's own options, in the field `longspec`. No other server has such a field, so others are misspelled."""

    is_closed: ClassVar = True

    tokens: bool = False
    """Add a field `longspec` to streamed chunks: tokens with their origins, and each round's tree."""
    speculate: bool = True
    """False decodes one token per round."""
    ignore_eos: bool = False
    """Answers have `max_tokens` tokens; for measurements."""


class _Generation(Strict):
    """Sampling fields that are None have the server's defaults."""

    hints: ClassVar = known.REQUEST_HINTS
    other_names: ClassVar = known.REQUEST_NAMES

    model: Text | None = None
    n: Count = 1
    best_of: Count | None = None
    """Accepted if it selects nothing: at 1 and at `n`."""
    temperature: float | None = Field(default=None, ge=0)
    top_p: float | None = Field(default=None, gt=0, le=1)
    top_k: int | None = Field(default=None, ge=-1, lt=2**31)
    """0 and -1 keep all tokens."""
    min_p: float | None = Field(default=None, ge=0, le=1)
    typical_p: float | None = Field(default=None, gt=0, le=1)
    """1 keeps all tokens."""
    epsilon_cutoff: float | None = Field(default=None, ge=0, lt=1)
    repetition_penalty: float | None = Field(default=None, ge=REPETITION_RANGE[0], le=REPETITION_RANGE[1])
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    no_repeat_ngram_size: int | None = Field(default=None, ge=0, le=MOST_NGRAM)
    min_tokens: int | None = Field(default=None, ge=0, lt=2**31)
    """Tokens that end an answer are banned before this length. Strings of `stop` are not."""
    logit_bias: dict[str, Bias] | None = None
    """By token id."""
    bad_words: list[Text] | None = None
    bad_words_ids: list[list[TokenId]] | None = None
    seed: Annotated[int | None, BeforeValidator(lambda x: None if x == -1 else x)] = Field(default=None, ge=0, lt=2**63)
    """Choice i of a request is drawn with seed + i. -1 asks for a fresh one."""
    stop: Stops = []
    """Strings that end an answer; they are not part of it."""
    max_tokens: TokenLimit | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    longspec: Extension = Extension()

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def echoed(self) -> list[str | None] | None:
        """The prompt of each choice that begins with it: its text, or None for the text of its token ids."""
        return None

    @property
    def drops_answer(self) -> bool:
        """Whether only the prompt is wanted."""
        return False

    @model_validator(mode="after")
    def _check_combinations(self) -> "_Generation":
        if self.best_of not in (None, 1, self.n):
            raise PydanticCustomError("unsupported", NOT_SUPPORTED, {"field": "best_of"})
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: only with stream")
        return self


class TextPart(Strict):
    hints: ClassVar = known.PART_HINTS

    type: Literal["text"]
    text: Text


class Message(Strict):
    hints: ClassVar = known.MESSAGE_HINTS
    neutral: ClassVar = known.MESSAGE_FIELDS

    role: Literal["system", "developer", "user", "assistant"]
    content: list[TextPart]

    @model_validator(mode="before")
    @classmethod
    def _list_parts(cls, values: Any) -> Any:
        """Text is one part. An assistant's turn may lack its content, as one that only called tools does."""
        content = values.get("content") if isinstance(values, dict) else None
        if isinstance(values, dict) and values.get("role") == "assistant" and content in known.UNSET:
            return {**values, "content": []}
        return {**values, "content": [{"type": "text", "text": content}]} if isinstance(content, str) else values

    @property
    def turn(self) -> Turn:
        return {"role": ROLES[self.role], "content": "".join(part.text for part in self.content)}


class ChatRequest(_Generation):
    """The body of /v1/chat/completions."""

    neutral: ClassVar = {**known.REQUEST_FIELDS, "add_special_tokens": (False,)}

    messages: list[Message] = Field(min_length=1)
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool = False
    """Return the log-probability of each token of the answer."""
    chat_template_kwargs: dict[str, TemplateValue] = {}
    """Variables of the chat template, such as `enable_thinking`; None leaves one as it is."""
    top_logprobs: int = Field(default=0, ge=0, le=MOST_ALTERNATIVES)
    """Most probable tokens to return with each token."""

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def alternatives(self) -> int | None:
        return self.top_logprobs if self.logprobs else None

    @model_validator(mode="after")
    def _check_logprobs(self) -> "ChatRequest":
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("unsupported", "only with logprobs", {"field": "top_logprobs"})
        return self


class CompletionRequest(_Generation):
    """The body of /v1/completions."""

    neutral: ClassVar = {**known.REQUEST_FIELDS, "add_special_tokens": (True,)}

    prompt: Prompts
    """Each is a str or a list[int]."""
    max_tokens: Annotated[int, Field(ge=-1)] | None = 16  # OpenAI's default for this route
    """As `TokenLimit`, or 0 with `echo`."""
    echo: bool = False
    """Begin the answer with the prompt."""
    logprobs: Annotated[int | None, BeforeValidator(lambda value: None if value is False else value)] = Field(
        default=None, ge=0, le=MOST_ALTERNATIVES
    )
    """Return the log-probability of each token and of this number of most probable tokens at its place."""

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def echoed(self) -> list[str | None] | None:
        texts = [prompt if isinstance(prompt, str) else None for prompt in self.prompt for _ in range(self.n)]
        return texts if self.echo else None

    @property
    def drops_answer(self) -> bool:
        return self.max_tokens == 0

    @model_validator(mode="after")
    def _check_limit(self) -> "CompletionRequest":
        if self.max_tokens == 0 and not self.echo:
            message = "should be greater than or equal to 1, or 0 with echo"
            raise PydanticCustomError("unsupported", message, {"field": "max_tokens"})
        return self
