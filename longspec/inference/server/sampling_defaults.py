"""The sampling settings of requests that name none: those of the target's generation config, as in vLLM."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from textwrap import shorten
from typing import Any

from transformers import GenerationConfig

from longspec.errors import UserError
from longspec.inference.arguments import check_sampling
from longspec.inference.options import FILTER_OPTIONS, check_filter
from longspec.inference.token_options import TOKEN_OPTIONS, token_settings


@dataclass(frozen=True)
class SamplingDefaults:
    """As in vLLM, `do_sample` has no influence."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    max_new_tokens: int | None = None
    """Of a chat answer; None is the server's own default."""
    token_options: Mapping[str, Any] = field(default_factory=dict)
    """Those of `token_options.TOKEN_OPTIONS` that have an effect."""

    @classmethod
    def read(cls, config: GenerationConfig, vocab: int) -> SamplingDefaults:
        """Raises UserError for a value of a wrong type or outside its range. vocab: size of the vocabulary."""
        known = {field.name: getattr(config, field.name, None) for field in fields(cls)}
        known["top_k"] = 0 if known["top_k"] == -1 else known["top_k"]  # vLLM's value that keeps all tokens
        options = {name: getattr(config, name, None) for name in TOKEN_OPTIONS}
        known["token_options"] = {
            name: value for name, value in options.items() if value not in (None, TOKEN_OPTIONS[name])
        }
        defaults = cls(**{name: value for name, value in known.items() if value is not None})
        try:
            check_sampling(defaults.max_new_tokens or 1, defaults.temperature, defaults.top_p, defaults.top_k)
            for name in FILTER_OPTIONS:
                check_filter(name, getattr(defaults, name))
            token_settings(defaults.token_options, (), vocab)
        except UserError as error:
            raise UserError(f"generation_config.{error}; correct the file, or use --generation_config none") from error
        return defaults

    def __str__(self) -> str:
        basic = f"temperature {self.temperature:g}, top_p {self.top_p:g}, top_k {self.top_k}"
        others = (f"{name} {shorten(str(value), 60)}" for name, value in self.token_options.items())
        return f"{', '.join((basic, *others))} for requests that name none"


WITHOUT_CONFIG = SamplingDefaults()
"""The target's own distribution, as in OpenAI's API."""
