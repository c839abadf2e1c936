"""The requests of OpenAI's API that the server answers, as pydantic models.

`known_fields` lists the fields of other servers that are refused; all others are ignored.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, AliasChoices, BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from longspec.data.aligners import ROLES, Turn
from longspec.inference.engine.requests import MOST_ALTERNATIVES
from longspec.inference.server import known_fields as known

MOST_MESSAGES = 1024
MOST_STOPS = 16
LONGEST_STOP = 1024
"""In characters."""


def _prompts(value: Any) -> list[str | list[int]]:
    """A prompt or a list of prompts as a list. A prompt is text or a list of token ids."""
    # A list that starts with an int is one prompt of token ids. `type`, because True is an int to isinstance.
    prompts = value if isinstance(value, list) and value and type(value[0]) is not int else [value]
    for prompt in prompts:
        is_ids = isinstance(prompt, list) and all(type(token) is int and token >= 0 for token in prompt)
        if not prompt or not (is_ids or isinstance(prompt, str)):
            raise ValueError("must be text, a list of token ids, or a list of such prompts, none of them empty")
    return prompts


def _token_limit(value: int) -> int:
    if value < 1 and value != -1:
        raise ValueError("should be greater than or equal to 1, or -1 for all the room that is left")
    return value


TokenLimit = Annotated[int, AfterValidator(_token_limit)]
Stop = Annotated[str, Field(max_length=LONGEST_STOP)]
Stops = Annotated[list[Stop], BeforeValidator(lambda value: [value] if isinstance(value, str) else value)]
Prompts = Annotated[list[Any], BeforeValidator(_prompts)]


class Strict(BaseModel):
    """Values are not converted between types. A field that is null or empty is absent."""

    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False, protected_namespaces=())
    neutral: ClassVar[dict[str, tuple[Any, ...]]] = {}
    """Further fields that would change the answer, and the values at which they do nothing."""

    @model_validator(mode="before")
    @classmethod
    def _drop_what_does_nothing(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values  # refused by pydantic
        kept = {}
        for name, value in values.items():
            if (own := cls.model_fields.get(name)) is None and name in cls.neutral:
                if not known.does_nothing(value, cls.neutral[name]):
                    # A client that takes the answer for one that obeys the field would be misled.
                    message = "not supported by this server; leave it out"
                    raise PydanticCustomError("unsupported", message, {"field": name})
            elif value not in known.UNSET or (own is not None and own.is_required()):
                kept[name] = value
        return kept


class StreamOptions(Strict):
    include_usage: bool = False


class Extension(Strict, extra="forbid"):
    """LongSpec's own options, in the field `longspec`. No other server has such a field, so others are misspelled."""

    tokens: bool = False
    """Add a field `longspec` to streamed chunks: tokens with their origins, and each round's tree."""
    speculate: bool = True
    """False decodes one token per round."""
    ignore_eos: bool = False
    """Answers have `max_tokens` tokens; for measurements."""


class Generation(Strict):
    """Sampling fields that are None have the server's defaults, and `ServedModel.sampling` checks their ranges. Unknown
    fields are in `model_extra`."""

    model: str | None = None
    n: int = Field(default=1, ge=1)
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = Field(default=None, lt=2**31)
    """0 and -1 keep all tokens."""
    min_p: float | None = None
    typical_p: float | None = Field(default=None, validation_alias=AliasChoices("typical_p", "typ_p", "typical"))
    epsilon_cutoff: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    no_repeat_ngram_size: int | None = None
    min_new_tokens: int | None = Field(default=None, validation_alias=AliasChoices("min_tokens", "min_new_tokens"))
    """Tokens that end an answer are banned before this length. Strings of `stop` are not."""
    logit_bias: dict[str, float] | None = None
    """By token id."""
    bad_words: list[str] | None = None
    bad_words_ids: list[list[int]] | None = None
    seed: int | None = Field(default=None, ge=-1, lt=2**63)
    """Choice i of a request is drawn with seed + i. -1 asks for a fresh one."""
    stop: Stops = Field(default=[], max_length=MOST_STOPS)
    """Strings that end an answer; they are not part of it."""
    stream: bool = False
    stream_options: StreamOptions = StreamOptions()
    longspec: Extension = Extension()


class TextPart(Strict):
    type: Literal["text"]
    text: str


class Message(Strict):
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


class ChatRequest(Generation):
    """The body of /v1/chat/completions."""

    neutral: ClassVar = {**known.REQUEST_FIELDS, "add_special_tokens": (False,)}

    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_tokens: TokenLimit | None = None
    max_completion_tokens: TokenLimit | None = None
    logprobs: bool = False
    """Return the log-probability of each token of the answer."""
    top_logprobs: int = Field(default=0, ge=0, le=MOST_ALTERNATIVES)
    """Most probable tokens to return with each token."""
    chat_template_kwargs: dict[str, Any] = {}
    """Variables of the chat template, such as `enable_thinking`; None leaves one as it is."""

    @property
    def token_limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    @property
    def limit_field(self) -> str:
        """The field that `token_limit` is from."""
        return "max_completion_tokens" if self.max_completion_tokens else "max_tokens"

    @property
    def alternatives(self) -> int | None:
        """None tells no log-probabilities."""
        return self.top_logprobs if self.logprobs or self.top_logprobs else None

    @property
    def echoed(self) -> list[str | None] | None:
        """The prompt of each choice that begins with it: its text, or None for the text of its token ids."""
        return None


class CompletionRequest(Generation):
    """The body of /v1/completions."""

    neutral: ClassVar = {**known.REQUEST_FIELDS, "add_special_tokens": (True,)}

    prompt: Prompts
    """Each is a str or a list[int]."""
    max_tokens: int | None = Field(default=16, ge=-1)
    """OpenAI's default for this route. As `TokenLimit`, or 0, with `echo` for instance."""
    echo: bool = False
    """Begin the answer with the prompt."""
    logprobs: Annotated[int | None, BeforeValidator(lambda value: None if value is False else value)] = Field(
        default=None, ge=0, le=MOST_ALTERNATIVES
    )
    """Return the log-probability of each token and of this number of most probable tokens at its place."""

    @property
    def token_limit(self) -> int | None:
        return self.max_tokens

    @property
    def limit_field(self) -> str:
        return "max_tokens"

    @property
    def alternatives(self) -> int | None:
        return self.logprobs

    @property
    def echoed(self) -> list[str | None] | None:
        texts = [prompt if isinstance(prompt, str) else None for prompt in self.prompt for _ in range(self.n)]
        return texts if self.echo else None


class TokenizeRequest(Strict):
    """The body of /tokenize, as vLLM serves it: clients that evaluate a model then need no copy of its tokenizer."""

    prompt: str
    add_special_tokens: bool = True
    """As in a completion. False adds no BOS."""


class DetokenizeRequest(Strict):
    """The body of /detokenize."""

    tokens: list[int]
