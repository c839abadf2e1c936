"""Fields of clients and other servers that this one does not implement, and the values at which they do nothing.

A field that is not set, or has such a value, is accepted. Another value of a field that would change the answer is
refused by name. Fields that are listed nowhere are ignored, and the response names them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

UNSET: tuple[Any, ...] = (None, "", [], {})
"""Values that clients send for fields without a value."""

REQUEST_HINTS = frozenset(
    {
        *("user", "metadata", "service_tier", "safety_identifier", "store", "priority", "request_id", "rid"),
        *("prompt_cache_key", "prompt_cache_retention", "cache_prompt", "cache_salt", "prediction"),
        *("parallel_tool_calls", "spaces_between_special_tokens", "include_reasoning", "separate_reasoning"),
        # Details of functions that are off.
        *("early_stopping", "length_penalty", "guided_decoding_backend", "guided_whitespace_pattern"),
        *("mirostat_tau", "mirostat_eta", "mirostat_lr", "mirostat_target", "repeat_last_n", "penalize_nl"),
        *("penalty_last_n", "penalty_range", "rep_pen_range", "rep_pen_slope", "repetition_penalty_range"),
        *("dry_base", "dry_allowed_length", "dry_penalty_last_n", "dry_sequence_breakers", "xtc_threshold"),
        *("dynatemp_exponent", "dynatemp_low", "dynatemp_high", "smoothing_curve", "adaptive_decay"),
        *("keep_alive", "timings_per_token", "id_slot", "n_keep", "session_id"),
        *("use_cache", "pad_token_id", "stream_reasoning", "return_progress"),
    }
)
"""Fields of a request that never change an answer."""

REQUEST_FIELDS: dict[str, tuple[Any, ...]] = {
    # OpenAI.
    "top_logprobs": (0,),
    **dict.fromkeys(("audio", "functions", "tools", "web_search_options", "suffix"), ()),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "response_format": ("text", {"type": "text"}),
    "tool_choice": ("none", "auto"),
    # Penalties and filters of other samplers.
    **dict.fromkeys(("repeat_penalty", "rep_pen", "encoder_repetition_penalty"), (1,)),
    **dict.fromkeys(("tfs", "tfs_z", "guidance_scale", "cfg_scale"), (1,)),
    **dict.fromkeys(("top_a", "eta_cutoff", "skew", "min_keep", "penalty_alpha"), (0,)),
    **dict.fromkeys(("dry_multiplier", "xtc_probability", "smoothing_factor", "dynatemp_range"), (0,)),
    **dict.fromkeys(("dynatemp_min", "dynatemp_max", "mirostat", "mirostat_mode"), (0,)),
    **dict.fromkeys(("top_n_sigma", "nsigma", "adaptive_target"), (0, -1)),
    **dict.fromkeys(("dynamic_temperature", "temperature_last", "watermark"), (False,)),
    **dict.fromkeys(("sampler_order", "sampler_priority", "samplers"), ()),
    **dict.fromkeys(("sampler_seed", "random_seed"), (-1,)),
    "do_sample": (True,),
    # Other ways to search.
    **dict.fromkeys(("num_beams", "num_beam_groups", "num_return_sequences"), (1,)),
    **dict.fromkeys(("use_beam_search", "beam_search"), (False,)),
    # Length, stop tokens and banned tokens.
    **dict.fromkeys(("min_length", "max_tokens_second", "encoder_no_repeat_ngram_size"), (0,)),
    **dict.fromkeys(("exponential_decay_length_penalty", "thinking_budget", "thinking_token_budget"), ()),
    **dict.fromkeys(("n_predict", "max_new_tokens", "num_predict", "max_length"), (-1,)),
    **dict.fromkeys(("t_max_predict_ms", "n_indent"), (0, -1)),
    **dict.fromkeys(("ignore_eos", "ban_eos_token", "bypass_eos", "use_default_badwordsids"), (False,)),
    **dict.fromkeys(("stop_token_ids", "stop_regex", "stop_sequences", "stop_sequence"), ()),
    **dict.fromkeys(("stop_strings", "eos_token_id", "forced_bos_token_id", "forced_eos_token_id"), ()),
    **dict.fromkeys(("banned_tokens", "banned_strings", "custom_token_bans"), ()),
    **dict.fromkeys(("allowed_token_ids", "suppress_tokens", "begin_suppress_tokens", "sequence_bias"), ()),
    **dict.fromkeys(("force_words_ids", "logits_processors", "custom_logit_processor"), ()),
    # The text of the answer.
    **dict.fromkeys(("include_stop_str_in_output", "no_stop_trim", "return_full_text", "raw_output"), (False,)),
    **dict.fromkeys(("return_tokens_as_token_ids", "return_token_ids", "return_tokens", "render_special"), (False,)),
    **dict.fromkeys(("skip_special_tokens", "detokenize"), (True,)),
    "prompt_logprobs": (False,),
    **dict.fromkeys(("n_probs", "top_n_tokens"), (0,)),
    # The prompt.
    **dict.fromkeys(("chat_template", "documents"), ()),
    **dict.fromkeys(("negative_prompt", "memory", "context", "template", "system"), ()),
    **dict.fromkeys(("images", "image_data", "mm_processor_kwargs", "multi_modal_data", "prompt_embeds"), ()),
    **dict.fromkeys(("add_generation_prompt", "add_bos_token"), (True,)),
    **dict.fromkeys(("continue_final_message", "token_healing", "safe_prompt", "raw"), (False,)),
    **dict.fromkeys(("truncate_prompt_tokens", "prompt_truncate_len", "truncate"), (-1,)),
    # Grammars and JSON.
    **dict.fromkeys(("guided_json", "guided_regex", "guided_choice", "guided_grammar"), ()),
    **dict.fromkeys(("structured_outputs", "structural_tag", "grammar", "grammar_string", "json_schema"), (False,)),
    **dict.fromkeys(("regex", "ebnf"), ()),
    "format": ("text",),
    "grammar_lazy": (False,),
    # Tools, searches and data of hosted services.
    **dict.fromkeys(("plugins", "data_sources", "dataSources", "mcp_servers"), ()),
    "search_parameters": ("off",),
    "enable_search": (False,),
    # Other weights, and settings of other servers.
    **dict.fromkeys(("lora", "lora_path", "lora_request", "adapter_id", "adapter"), ()),
    **dict.fromkeys(("options", "vllm_xargs", "custom_params", "nvext"), ()),
}
"""Fields of a request that would change its answer: the values at which they do nothing, those of `UNSET` aside.

A mapping does nothing if all its values do.
"""

REQUEST_NAMES = {"typ_p": "typical_p", "typical": "typical_p", "min_new_tokens": "min_tokens"}
"""Names of other servers for fields of a request."""

MESSAGE_HINTS = frozenset({"name", "cache_control", "annotations", "id"})
"""Fields of a message that never change an answer. A name is not shown to the target."""
MESSAGE_FIELDS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("tool_calls", "tool_call_id", "function_call", "tools", "refusal", "audio"), ()),
    **dict.fromkeys(("reasoning", "reasoning_content", "reasoning_details", "thinking", "thinking_blocks"), ()),
    **dict.fromkeys(("images", "documents", "attachments", "experimental_attachments", "files"), ()),
    **dict.fromkeys(("prefix", "partial"), (False,)),
}
"""The same for fields of a message that would change the answer."""
PART_HINTS = frozenset({"cache_control", "annotations", "citations", "id"})
"""Fields of a part of a message that never change an answer."""


def does_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a field with this value is as good as absent. neutral: values that do nothing, those of `UNSET` aside."""
    if value in UNSET or value in neutral:
        return True
    if not isinstance(value, Mapping):
        return False
    kept = {name: inner for name, inner in value.items() if inner not in UNSET}
    return kept in neutral or all(inner in neutral for inner in kept.values())
