"""The sampling settings of requests that name none: those of the target's generation config, as in vLLM."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from textwrap import shorten
from typing import Any

from transformers import GenerationConfig

from longspec.errors import UserError
from longspec.inference.arguments import check_sampling
from longspec.inference.request import FILTERS, Sampling
from longspec.inference.token_options import TOKEN_OPTIONS, token_settings


@dataclass(frozen=True)
class SamplingDefaults:
    """The default is that of OpenAI's API: the target's own distribution. As in vLLM, `do_sample` has no influence."""

    sampling: Sampling = field(default_factory=partial(Sampling, temperature=1.0))
    """Temperature and filters."""
    max_new_tokens: int | None = None
    """Of a chat answer; None is the server's own default."""
    token_options: Mapping[str, Any] = field(default_factory=dict)
    """Those of `token_options.TOKEN_OPTIONS` that have an effect."""

    @classmethod
    def read(cls, config: GenerationConfig, vocab: int) -> "SamplingDefaults":
        """Raises UserError for a value of a wrong type or outside its range. vocab: size of the vocabulary."""

        def given(*names: str) -> dict[str, Any]:
            return {name: value for name in names if (value := getattr(config, name, None)) is not None}

        own = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, **given("temperature", *FILTERS)}
        own["top_k"] = 0 if own["top_k"] == -1 else own["top_k"]  # vLLM's value that keeps all tokens
        options = {name: value for name, value in given(*TOKEN_OPTIONS).items() if value != TOKEN_OPTIONS[name]}
        limit = getattr(config, "max_new_tokens", None)
        try:
            check_sampling(limit or 1, **own)
            token_settings(options, (), vocab)
        except UserError as error:
            raise UserError(f"generation_config.{error}; correct the file, or use --generation_config none") from error
        return cls(Sampling(**own), limit, options)

    def __str__(self) -> str:
        own = self.sampling
        basic = f"temperature {own.temperature:g}, top_p {own.top_p:g}, top_k {own.top_k}"
        others = (f"{name} {shorten(str(value), 60)}" for name, value in self.token_options.items())
        return f"{', '.join((basic, *others))} for requests that name none"
