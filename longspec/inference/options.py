"""Options of transformers' `generate`: those that decoding applies, those without effect, and those it refuses.

A filter that depends on one row of logits alone is applied to target and draft alike, so every acceptance rule stays
exact. Options that depend on earlier tokens and options of other decoding algorithms are refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Sized
from numbers import Real
from typing import Any

from transformers import GenerationConfig

from longspec.errors import UserError
from longspec.inference.request import FILTERS

FILTER_OPTIONS = ("min_p", "typical_p", "epsilon_cutoff")
"""The filters of `request.FILTERS` that are options."""
STOPPING = ("max_time", "stop_strings")
"""Options that only `model.generate` supports, as stopping criteria."""
NEUTRAL: dict[str, Any] = {
    "repetition_penalty": 1.0,
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
    "num_beams": 1,
    "num_beam_groups": 1,
}
"""Values at which an option has no effect. Other options have none at None, 0, False or an empty value."""
# Options that decoding applies, and those that change no token.
_APPLIED = {
    *FILTER_OPTIONS,
    *STOPPING,
    *("do_sample", "temperature", "top_k", "top_p", "max_length", "max_new_tokens"),
    *("num_return_sequences", "return_dict_in_generate", "bos_token_id", "eos_token_id", "pad_token_id"),
}
_WITHOUT_EFFECT = {
    # Settings of beam search and of assistants; these modes themselves are refused.
    *("early_stopping", "length_penalty", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size"),
    # How transformers' own decoding loop runs, and a setting of encoder-decoder models.
    *("use_cache", "max_cache_len", "compile_config", "disable_compile", "low_memory", "prefill_chunk_size"),
    *("continuous_batching_config", "renormalize_logits", "decoder_start_token_id", "transformers_version"),
}
REFUSED = tuple(
    name
    for name in vars(GenerationConfig())
    if not name.startswith("_") and name not in _APPLIED and name not in _WITHOUT_EFFECT
)
"""Options that must have a neutral value. They include all that later versions of transformers add."""


def refuse_options(arguments: Mapping[str, Any], config: GenerationConfig, names: Sequence[str] = REFUSED) -> None:
    """Raise UserError for an option that decoding cannot apply.

    arguments: override the model's generation config. names: the options to refuse.
    """
    for name in names:
        value = arguments[name] if name in arguments else getattr(config, name, None)
        if value is None:
            continue
        is_neutral = len(value) == 0 if isinstance(value, Sized) else value == NEUTRAL.get(name, 0)
        if is_neutral:
            continue
        source = name if name in arguments else f"generation_config.{name}"
        problem = "applies to model.generate only" if name in STOPPING else "is not supported with speculative decoding"
        raise UserError(f"{source}: {value!r} {problem}; leave it out or pass {name}={NEUTRAL.get(name)!r}")


def filter_values(arguments: Mapping[str, Any], config: GenerationConfig) -> dict[str, float]:
    """The values of FILTER_OPTIONS. Raises UserError for a value outside its range.

    arguments: override the model's generation config.
    """
    values = {}
    for name in FILTER_OPTIONS:
        value = arguments[name] if name in arguments else getattr(config, name, None)
        values[name] = FILTERS[name] if value is None else value
        check_filter(name, values[name])
    return values


def check_filter(name: str, value: Any) -> None:
    """Raise UserError for a value of one of FILTER_OPTIONS outside its range."""
    if value == FILTERS[name]:
        return
    # typical_p and epsilon_cutoff exclude 1, at which no token would be left.
    if not isinstance(value, Real) or not 0 < float(value) <= 1 or (value == 1 and name != "min_p"):
        end = "at most 1" if name == "min_p" else "less than 1"
        raise UserError(f"{name}: {value!r}; it must be greater than 0 and {end}")
