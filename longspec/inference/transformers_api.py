"""`model.generate`: speculative decoding with the arguments and results of transformers' `generate`, which prepares
prompts, masks and lengths, and then calls `_decode` instead of its own decoding loop."""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, MaxTimeCriteria, StoppingCriteria, StopStringCriteria
from transformers.generation import GenerateDecoderOnlyOutput

from longspec.errors import UserError
from longspec.inference import options
from longspec.inference.arguments import check_stopping, check_token_ids
from longspec.inference.generate import Streamer, ends_streamer, generate
from longspec.inference.request import FILTER_OPTIONS
from longspec.inference.stats import GenerationStats
from longspec.inference.token_options import TOKEN_OPTIONS
from longspec.models.glide import GlideMixin
from longspec.models.target_files import check_special_tokens

DECODING = (
    *("method", "tree_shape", "gamma", "tree_rule", "tree_nodes", "lookup_branches", "seed", "compile", "attention"),
    *("allow_untrained_draft", "deterministic"),
)
"""Arguments of `longspec.generate` that transformers' does not have."""
_REFUSED_ARGUMENTS = (
    *("prefix_allowed_tokens_fn", "synced_gpus", "assistant_model", "assistant_tokenizer", "negative_prompt_ids"),
    *("negative_prompt_attention_mask", "custom_generate", "inputs_embeds", "position_ids", "past_key_values"),
)
"""Arguments of transformers' `generate` that are not part of a generation config."""
_HANDLED = (*options.REFUSED, *TOKEN_OPTIONS, *options.CACHES, "stop_strings")
"""Options that are checked or applied here, or that belong to transformers' own decoding loop."""


@dataclass
class SpeculativeOutput(GenerateDecoderOnlyOutput):
    """The result of `model.generate(..., return_dict_in_generate=True)`; only `sequences` and `stats` are set."""

    stats: GenerationStats | None = None


@ends_streamer
def generate_as_transformers(
    self: GlideMixin,
    inputs: Tensor | Mapping[str, Any] | None = None,
    generation_config: GenerationConfig | None = None,
    logits_processor: LogitsProcessorList | None = None,
    stopping_criteria: Sequence[StoppingCriteria] | None = None,
    *,
    streamer: Streamer | None = None,
    **kwargs: Any,
) -> Tensor | SpeculativeOutput:
    """transformers' `generate` with speculative decoding, whose arguments (DECODING) are those of `longspec.generate`.
    Returns LongTensor [B * num_return_sequences, length]: the prompts as passed in and the new tokens, padded on the
    right; with return_dict_in_generate a `SpeculativeOutput`. Criteria and stop_strings (which need `tokenizer`) end
    each row independently. Raises UserError for every option that decoding cannot apply (see `options`)."""
    own, decoding = self.generation_config, {name: kwargs.pop(name) for name in DECODING if name in kwargs}
    if isinstance(inputs, Mapping):
        kwargs, inputs = {**inputs, **kwargs}, None
    input_ids = kwargs.get("input_ids") if inputs is None else inputs
    if input_ids is not None:
        check_token_ids(input_ids)
    for name in _REFUSED_ARGUMENTS:
        value = kwargs.pop(name, None)
        if value is not None and value is not False:
            raise UserError(f"{name}: not supported with speculative decoding; leave it out")
    if logits_processor:
        raise UserError("logits_processor: not supported with speculative decoding; leave it out")
    check_stopping(stopping_criteria)
    check_special_tokens(own if generation_config is None else generation_config, "generation_config")
    given = _given_options(self, generation_config, kwargs)
    decoding |= {"streamer": streamer, **{name: given[name] for name in TOKEN_OPTIONS if name in given}}
    tokenizer, stop_strings = kwargs.pop("tokenizer", None), given.get("stop_strings", own.stop_strings)
    if given.get("stop_strings") and tokenizer is None:
        raise UserError("stop_strings: pass tokenizer= as well")
    criteria = list(stopping_criteria or ())
    if stop_strings and tokenizer is not None:
        criteria.append(StopStringCriteria(tokenizer, stop_strings))
    # transformers reads the defaults from the model; this one shares everything else with `self`.
    model = copy(self)
    model.generation_config = _without(own, _HANDLED)
    generation_config = generation_config and _without(generation_config, _HANDLED)
    decode = partial(_decode, own=self, decoding=decoding, criteria=criteria)
    return super(GlideMixin, model).generate(inputs, generation_config, custom_generate=decode, **kwargs)  # type: ignore[misc]


def _given_options(model: GlideMixin, config: GenerationConfig | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    """The caller's values of _HANDLED, from the arguments or else from the config that is passed in. Removes them from
    the arguments. Raises UserError for one that decoding cannot apply, and reports those of the model's own config."""
    own, given = model.generation_config, {}
    for name in _HANDLED:
        value = getattr(config, name, None)
        # A pipeline passes a copy of the model's own config.
        if value is not None and (name in TOKEN_OPTIONS or value != getattr(own, name)):
            given[name] = value
        if name in kwargs:
            given[name] = kwargs.pop(name)
    options.refuse_options(given)
    strings = () if kwargs.get("tokenizer") is None else ("stop_strings",)
    options.report_ignored(own, model.config.name_or_path, (*options.FILE_OPTIONS, *given, "max_time", *strings))
    return given


def _decode(
    model: GlideMixin,
    input_ids: Tensor,
    stopping_criteria: Sequence[StoppingCriteria],
    generation_config: GenerationConfig,
    own: GlideMixin,
    decoding: Mapping[str, Any],
    criteria: Sequence[StoppingCriteria],
    **others: Any,
) -> Tensor | SpeculativeOutput:
    """What transformers calls in place of its own decoding loop, with a copy of the model `own`. stopping_criteria:
    transformers', of which only time limits apply. decoding: arguments of `longspec.generate`."""
    # The model's own config must not apply again.
    decoding = {**dict.fromkeys((*options.REFUSED, *options.STOPPING)), **decoding}
    timers = [criterion for criterion in stopping_criteria if isinstance(criterion, MaxTimeCriteria)]
    # The pad token, else the first EOS as in transformers, else 0.
    ids = next((i for i in (generation_config.pad_token_id, generation_config.eos_token_id) if i is not None), 0)
    pad_token_id = int(torch.as_tensor(ids).flatten()[0])
    out = generate.__wrapped__(  # type: ignore[attr-defined]
        own,
        input_ids,
        others.get("attention_mask"),
        max_new_tokens=generation_config.max_length - input_ids.shape[1],
        **_sampling(generation_config),
        eos_token_id=() if generation_config.eos_token_id is None else generation_config.eos_token_id,
        pad_token_id=pad_token_id,
        stopping_criteria=[*timers, *criteria],
        **decoding,
    )

    # transformers returns the prompts with their padding.
    new = torch.nn.utils.rnn.pad_sequence(out.new_tokens, batch_first=True, padding_value=pad_token_id)
    sequences = torch.cat([input_ids.to(new.device), new], 1)
    if generation_config.return_dict_in_generate:
        return SpeculativeOutput(sequences=sequences, stats=out.stats)  # type: ignore[arg-type]
    return sequences


def _without(config: GenerationConfig, names: Sequence[str]) -> GenerationConfig:
    """A copy of `config` in which these options are not set."""
    config = copy(config)
    for name in names:
        setattr(config, name, None)
    return config


def _sampling(config: GenerationConfig) -> dict[str, Any]:
    """The sampling settings of `longspec.generate`, from a config that transformers has completed."""
    if not config.do_sample:
        return {"temperature": 0.0}
    neutral = {"temperature": 1.0, "top_p": 1.0, "top_k": 0}
    settings = {name: getattr(config, name) for name in (*neutral, *FILTER_OPTIONS)}
    return settings | {name: value for name, value in neutral.items() if settings[name] is None}
