"""The sampling settings of requests that name none: those of the target's generation config, as in vLLM."""

from __future__ import annotations

from dataclasses import dataclass, fields

from transformers import GenerationConfig

from longspec.errors import UserError
from longspec.inference.arguments import check_sampling
from longspec.inference.options import FILTER_OPTIONS, check_filter


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

    @classmethod
    def read(cls, config: GenerationConfig) -> SamplingDefaults:
        """Raises UserError for a value of a wrong type or outside its range."""
        known = {field.name: getattr(config, field.name) for field in fields(cls)}
        defaults = cls(**{name: value for name, value in known.items() if value is not None})
        try:
            check_sampling(defaults.max_new_tokens or 1, defaults.temperature, defaults.top_p, defaults.top_k)
            for name in FILTER_OPTIONS:
                check_filter(name, getattr(defaults, name))
        except UserError as error:
            raise UserError(f"generation_config.{error}; correct the file, or use --generation_config none") from error
        return defaults

    def __str__(self) -> str:
        return f"temperature {self.temperature:g}, top_p {self.top_p:g}, top_k {self.top_k} for requests that name none"


WITHOUT_CONFIG = SamplingDefaults()
"""The target's own distribution, as in OpenAI's API."""
