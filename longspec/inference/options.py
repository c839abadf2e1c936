"""Options of transformers' `generate`: those that decoding applies, those without effect, and those it cannot apply.
The latter are refused by name if the caller sets them; in the target's generation config, a warning names them."""

from collections.abc import Callable, Collection, Mapping, Sequence, Sized
from textwrap import shorten
from typing import Any

from transformers import GenerationConfig

from longspec.errors import UserError, warn_once
from longspec.inference.request import FILTER_OPTIONS, FILTERS
from longspec.inference.token_options import TOKEN_OPTIONS, check_option, token_settings

FILE_OPTIONS = (*FILTER_OPTIONS, *TOKEN_OPTIONS)
"""Options whose defaults are those of the target's generation config, in `generate` and in the commands that answer."""
STOPPING = ("max_time", "stop_strings")
"""Options that only `model.generate` supports, as stopping criteria."""
NEUTRAL: dict[str, Any] = {
    "encoder_repetition_penalty": 1.0,
    "guidance_scale": 1.0,
    "num_beams": 1,
    "num_beam_groups": 1,
    **{name: FILTERS[name] for name in FILTER_OPTIONS},
    **TOKEN_OPTIONS,
}
"""Values at which an option has no effect. Other options have none at None, 0, False or an empty value."""
CACHES = ("cache_implementation", "cache_config")
"""Options of transformers' own KV cache. Decoding has its own."""
_SILENT = {
    # What transformers would return in addition, and its own speculative decoding: no token depends on them.
    *("output_scores", "output_logits", "output_attentions", "output_hidden_states", "prompt_lookup_num_tokens"),
    *("use_mtp", "speculation_type", "is_assistant", "assistant_early_exit", "assistant_ensemble_weight"),
}
"""Options in a target's generation config that are ignored without a warning."""
_ACCEPTED = {
    # Options that decoding applies.
    *(*FILE_OPTIONS, *STOPPING, "do_sample", "temperature", "top_k", "top_p", "max_length", "max_new_tokens"),
    *("num_return_sequences", "return_dict_in_generate", "bos_token_id", "eos_token_id", "pad_token_id"),
    # Options that change no token. Settings of beam search and of assistants; these modes themselves are refused.
    *("early_stopping", "length_penalty", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "max_matching_ngram_size"),
    # How transformers' own decoding loop runs, and a setting of encoder-decoder models.
    *("use_cache", "max_cache_len", "compile_config", "disable_compile", "low_memory", "prefill_chunk_size"),
    *("continuous_batching_config", "renormalize_logits", "decoder_start_token_id", "transformers_version", *CACHES),
}
REFUSED = tuple(name for name in vars(GenerationConfig()) if not name.startswith("_") and name not in _ACCEPTED)
"""Options that a caller must leave at a neutral value. They include all that later versions of transformers add."""
WITHOUT_FILE: dict[str, Any] = dict.fromkeys((*REFUSED, *STOPPING, *FILE_OPTIONS))
"""Arguments of `generate` with which the target's generation config does not apply, for measurements."""


def is_neutral(name: str, value: Any) -> bool:
    """Whether an option has no effect at this value."""
    if value is None:
        return True
    return len(value) == 0 if isinstance(value, Sized) else bool(value == NEUTRAL.get(name, 0))


def refuse_options(arguments: Mapping[str, Any], names: Sequence[str] = REFUSED) -> None:
    """Raise UserError for an option of the caller that decoding cannot apply. names: the options to refuse."""
    for name in names:
        value = arguments.get(name)
        if not is_neutral(name, value):
            reason = "is not supported with speculative decoding"
            reason = "applies to model.generate only" if name in STOPPING else reason
            raise UserError(f"{name}: {value!r} {reason}; leave it out or pass {name}={NEUTRAL.get(name)!r}")


def check_arguments(arguments: Mapping[str, Any], config: GenerationConfig, target: str | None) -> None:
    """Refuse options of `generate` that it does not apply, and report those of the target's generation config."""
    # Some tokenizers return token_type_ids.
    for name in arguments.keys() - {*WITHOUT_FILE, "token_type_ids"}:
        raise UserError(f"{name}: not an argument of longspec.generate; model.generate takes those of transformers")
    refuse_options(arguments, (*REFUSED, *STOPPING))
    report_ignored(config, target, (*FILE_OPTIONS, *arguments))


def report_ignored(
    config: GenerationConfig,
    target: str | None,
    applied: Collection[str],
    report: Callable[[str], object] | None = None,
) -> None:
    """Say in one line which options of a target's generation config change its answers, but are ignored. applied: those
    that are not ignored. report: called with the line; None logs it as a warning, once per process."""
    names = (name for name in WITHOUT_FILE if name not in _SILENT and name not in applied)
    values = {name: getattr(config, name, None) for name in names}
    if ignored := {name: value for name, value in values.items() if not is_neutral(name, value)}:
        settings = ", ".join(f"{name} {shorten(str(value), 60)}" for name, value in ignored.items())
        (report or warn_once)(
            f"{target}: its generation config sets {settings}, which is ignored; answers follow the target's "
            "distribution without it"
        )


def sampling_settings(
    arguments: Mapping[str, Any],
    config: GenerationConfig,
    stop_ids: Collection[int],
    vocab: int,
    prompt_length: int,
) -> dict[str, Any]:
    """The fields of `Sampling` that follow from FILE_OPTIONS, of the arguments or else of a generation config. See
    `token_settings`. Raises UserError, which says whether a value is the config's."""
    values = {name: arguments[name] if name in arguments else getattr(config, name, None) for name in FILE_OPTIONS}
    filters = {name: FILTERS[name] if values[name] is None else values[name] for name in FILTER_OPTIONS}
    try:
        for name, value in filters.items():
            check_option(name, value)
        return filters | token_settings(values, stop_ids, vocab, prompt_length)
    except UserError as error:
        if (name := str(error).partition(":")[0]) in arguments:
            raise
        raise UserError(f"generation_config.{error}; correct the file, or give {name} yourself") from error
