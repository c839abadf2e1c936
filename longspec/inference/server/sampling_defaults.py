"""The sampling settings of requests that name none: those of the target's generation config, as in vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from textwrap import shorten
from typing import Any

from transformers import GenerationConfig

from longspec.errors import UserError
from longspec.inference.arguments import check_sampling
from longspec.inference.request import FILTERS, Sampling
from longspec.inference.token_options import TOKEN_OPTIONS, token_settings

UNCHANGED = Sampling(temperature=1.0)
"""The target's own distribution."""


@dataclass(frozen=True)
class SamplingDefaults:
    """As in vLLM, `do_sample` has no influence."""

    sampling: Sampling = UNCHANGED
    """Temperature and filters."""
    max_new_tokens: int | None = None
    """Of a chat answer; None is the server's own default."""
    token_options: Mapping[str, Any] = field(default_factory=dict)
    """Those of `token_options.TOKEN_OPTIONS` that have an effect."""

    @classmethod
    def read(cls, config: GenerationConfig, vocab: int) -> "SamplingDefaults":
        """Raises UserError for a value of a wrong type or outside its range. vocab: size of the vocabulary."""
        names = ("temperature", *FILTERS, "max_new_tokens", *TOKEN_OPTIONS)
        known = {name: value for name in names if (value := getattr(config, name, None)) is not None}
        options = {name: known.pop(name) for name in TOKEN_OPTIONS if name in known}
        options = {name: value for name, value in options.items() if value != TOKEN_OPTIONS[name]}
        known = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **known}
        known["top_k"] = 0 if known["top_k"] == -1 else known["top_k"]  # vLLM's value that keeps all tokens
        limit = known.pop("max_new_tokens", None)
        try:
            check_sampling(limit or 1, **known)
            token_settings(options, (), vocab)
        except UserError as error:
            raise UserError(f"generation_config.{error}; correct the file, or use --generation_config none") from error
        return cls(Sampling(**known), limit, options)

    def __str__(self) -> str:
        own = self.sampling
        basic = f"temperature {own.temperature:g}, top_p {own.top_p:g}, top_k {own.top_k}"
        others = (f"{name} {shorten(str(value), 60)}" for name, value in self.token_options.items())
        return f"{', '.join((basic, *others))} for requests that name none"


WITHOUT_CONFIG = SamplingDefaults()
"""As in OpenAI's API."""
