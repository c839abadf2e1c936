"""Fields of clients and other servers that this one does not implement, and the values at which they do nothing.

A field that is not set, or has such a value, is accepted. Another value of a field that would change the answer is
refused by name. Fields that are listed nowhere are ignored, and the response names them.
"""

from collections.abc import Mapping
from typing import Any

UNSET: tuple[Any, ...] = (None, "", [], {})
"""Values that clients send for fields without a value."""


def _fields(names: str, *neutral: Any) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(names.split(), neutral)


REQUEST_HINTS = _fields("""
    user metadata service_tier safety_identifier store priority request_id rid prompt_cache_key prompt_cache_retention
    cache_prompt cache_salt prediction parallel_tool_calls spaces_between_special_tokens include_reasoning
    separate_reasoning early_stopping length_penalty guided_decoding_backend guided_whitespace_pattern mirostat_tau
    mirostat_eta mirostat_lr mirostat_target repeat_last_n penalize_nl penalty_last_n penalty_range rep_pen_range
    rep_pen_slope repetition_penalty_range dry_base dry_allowed_length dry_penalty_last_n dry_sequence_breakers
    xtc_threshold dynatemp_exponent dynatemp_low dynatemp_high smoothing_curve adaptive_decay keep_alive
    timings_per_token id_slot n_keep session_id use_cache pad_token_id stream_reasoning return_progress
""").keys()
"""Fields of a request that never change an answer, and details of functions that are off."""

REQUEST_FIELDS: dict[str, tuple[Any, ...]] = {
    **_fields("audio functions tools web_search_options suffix sampler_order sampler_priority samplers"),
    **_fields("exponential_decay_length_penalty thinking_budget thinking_token_budget stop_token_ids stop_regex"),
    **_fields("stop_sequences stop_sequence stop_strings eos_token_id forced_bos_token_id forced_eos_token_id"),
    **_fields("banned_tokens banned_strings custom_token_bans allowed_token_ids suppress_tokens begin_suppress_tokens"),
    **_fields("sequence_bias force_words_ids logits_processors custom_logit_processor chat_template documents"),
    **_fields("negative_prompt memory context template system images image_data mm_processor_kwargs multi_modal_data"),
    **_fields("prompt_embeds guided_json guided_regex guided_choice guided_grammar regex ebnf plugins data_sources"),
    **_fields("dataSources mcp_servers lora lora_path lora_request adapter_id adapter options vllm_xargs"),
    **_fields("custom_params nvext"),
    **_fields("echo dynamic_temperature temperature_last watermark use_beam_search beam_search ignore_eos", False),
    **_fields("ban_eos_token bypass_eos use_default_badwordsids include_stop_str_in_output no_stop_trim", False),
    **_fields("return_full_text raw_output return_tokens_as_token_ids return_token_ids return_tokens", False),
    **_fields("render_special prompt_logprobs continue_final_message token_healing safe_prompt raw", False),
    **_fields("structured_outputs structural_tag grammar grammar_string json_schema grammar_lazy enable_search", False),
    **_fields("top_logprobs top_a eta_cutoff skew min_keep penalty_alpha dry_multiplier xtc_probability", 0),
    **_fields("smoothing_factor dynatemp_range dynatemp_min dynatemp_max mirostat mirostat_mode min_length", 0),
    **_fields("max_tokens_second encoder_no_repeat_ngram_size n_probs top_n_tokens", 0),
    **_fields("repeat_penalty rep_pen encoder_repetition_penalty tfs tfs_z guidance_scale cfg_scale num_beams", 1),
    **_fields("num_beam_groups num_return_sequences", 1),
    **_fields("sampler_seed random_seed n_predict max_new_tokens num_predict max_length truncate_prompt_tokens", -1),
    **_fields("prompt_truncate_len truncate", -1),
    **_fields("top_n_sigma nsigma adaptive_target t_max_predict_ms n_indent", 0, -1),
    **_fields("do_sample skip_special_tokens detokenize add_generation_prompt add_bos_token", True),
    **_fields("function_call tool_choice", "none", "auto"),
    **_fields("modalities", ["text"]),
    **_fields("response_format", "text", {"type": "text"}),
    **_fields("format", "text"),
    **_fields("search_parameters", "off"),
}
"""Fields of a request that would change its answer: the values at which they do nothing, those of `UNSET` aside.

A mapping does nothing if all its values do.
"""

REQUEST_NAMES = {"typ_p": "typical_p", "typical": "typical_p", "min_new_tokens": "min_tokens"}
"""Names of other servers for fields of a request."""

MESSAGE_HINTS = frozenset({"name", "cache_control", "annotations", "id"})
"""Fields of a message that never change an answer. A name is not shown to the target."""
MESSAGE_FIELDS: dict[str, tuple[Any, ...]] = {
    **_fields("tool_calls tool_call_id function_call tools refusal audio reasoning reasoning_content"),
    **_fields("reasoning_details thinking thinking_blocks images documents attachments experimental_attachments files"),
    **_fields("prefix partial", False),
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
