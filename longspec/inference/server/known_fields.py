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
    **_fields("audio functions tools web_search_options suffix stop_token_ids stop_regex eos_token_id chat_template"),
    **_fields("suppress_tokens begin_suppress_tokens sequence_bias force_words_ids logits_processors"),
    **_fields("custom_logit_processor documents template system images mm_processor_kwargs prompt_embeds guided_json"),
    **_fields("guided_regex guided_choice guided_grammar regex ebnf lora_path lora_request allowed_token_ids"),
    **_fields("echo ignore_eos use_beam_search include_stop_str_in_output no_stop_trim return_token_ids", False),
    **_fields("return_tokens_as_token_ids prompt_logprobs continue_final_message raw json_schema grammar", False),
    **_fields("structured_outputs structural_tag", False),
    **_fields("top_logprobs top_a eta_cutoff penalty_alpha dry_multiplier xtc_probability dynatemp_range", 0),
    **_fields("mirostat min_length n_probs encoder_no_repeat_ngram_size", 0),
    **_fields("best_of repeat_penalty rep_pen typ_p typical tfs tfs_z guidance_scale num_beams", 1),
    **_fields("n_predict max_new_tokens num_predict max_length truncate_prompt_tokens", -1),
    **_fields("do_sample skip_special_tokens detokenize add_generation_prompt", True),
    **_fields("function_call tool_choice", "none", "auto"),
    **_fields("modalities", ["text"]),
    **_fields("response_format", "text", {"type": "text"}),
}
"""Fields of a request: the values at which they do nothing, those of `UNSET` aside."""

MESSAGE_FIELDS: dict[str, tuple[Any, ...]] = {
    **_fields("tool_calls tool_call_id function_call tools refusal audio reasoning reasoning_content"),
    **_fields("reasoning_details thinking thinking_blocks images documents attachments"),
    **_fields("prefix partial", False),
}
"""The same for fields of a message."""


def does_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a field with this value is as good as absent. neutral: values that do nothing, those of `UNSET` aside."""
    if isinstance(value, dict):
        value = {name: inner for name, inner in value.items() if inner not in UNSET}
    return value in UNSET or value in neutral
