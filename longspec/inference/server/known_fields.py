"""Fields of other servers that would change an answer and that this one does not implement.

A field that is not set, or has a value at which it does nothing, is accepted; another value is refused by name. Fields
that are listed nowhere are ignored.
"""

from typing import Any

UNSET: tuple[Any, ...] = (None, "", [], {})
"""Values that clients send for fields without a value."""


def _fields(names: str, *neutral: Any) -> dict[str, tuple[Any, ...]]:
    return dict.fromkeys(names.split(), neutral)


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
    **_fields("best_of repeat_penalty rep_pen encoder_repetition_penalty tfs tfs_z guidance_scale cfg_scale", 1),
    **_fields("num_beams num_beam_groups num_return_sequences", 1),
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
"""Fields of a request: the values at which they do nothing, those of `UNSET` aside."""

MESSAGE_FIELDS: dict[str, tuple[Any, ...]] = {
    **_fields("tool_calls tool_call_id function_call tools refusal audio reasoning reasoning_content"),
    **_fields("reasoning_details thinking thinking_blocks images documents attachments experimental_attachments files"),
    **_fields("prefix partial", False),
}
"""The same for fields of a message."""


def does_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a field with this value is as good as absent. neutral: values that do nothing, those of `UNSET` aside."""
    if isinstance(value, dict):
        value = {name: inner for name, inner in value.items() if inner not in UNSET}
    return value in UNSET or value in neutral
