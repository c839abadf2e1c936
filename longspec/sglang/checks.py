"""What a server with GLIDE cannot do, refused in one line before anything is loaded, and what a graph cannot."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedConfig

from longspec.errors import UserError
from longspec.models.draft_files import check_draft, draft_settings
from longspec.models.draft_layer import GLIDE, GlideDecoderLayer, check_window
from longspec.models.draft_vocabulary import MAPS
from longspec.models.families import class_of
from longspec.models.target_split import check_divisible
from longspec.sglang.large_batches import most_nodes

FAMILIES = ("llama", "qwen2", "qwen3")
"""Supported targets by `model_type`: those whose layers all attend to the whole prefix."""
DEFAULT_TREE = {"speculative_num_steps": 5, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 32}
ONLY: dict[str, Any] = {
    **{"device": "cuda", "disaggregation_mode": "null", "kv_cache_dtype": "auto", "speculative_token_map": None},
    **dict.fromkeys(("pp_size", "dcp_size", "attn_cp_size"), 1),
    **dict.fromkeys(("enable_dp_attention", "enable_two_batch_overlap", "enable_pdmux"), False),
    **dict.fromkeys(("enable_hierarchical_cache", "enable_hisparse", "enable_unified_memory"), False),
}
"""Supported values of SGLang's options. The draft reads keys and values of the target where one GPU, or its tensor
parallel part, stores them in the model's dtype."""


def set_default_tree(args: Any) -> None:
    """Fill in the tree's options if none is given. Raises UserError if some are."""
    values = [getattr(args, name) for name in DEFAULT_TREE]
    if values == [None] * 3:
        for name, value in DEFAULT_TREE.items():
            setattr(args, name, value)
    elif None in values or min(values) < 1:
        raise UserError(
            "--speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens: give all three, "
            "such as 5, 4 and 32, or none"
        )


def check_server(args: Any, config: PreTrainedConfig) -> None:
    """Raise UserError unless a server with SGLang's options `args` and a target with `config` can run GLIDE."""
    if not args.speculative_draft_model_path:
        raise UserError("--speculative-draft-model-path: missing; give the draft's folder, file or hub id")
    for name, only in ONLY.items():
        if (value := getattr(args, name, only)) != only:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} {value}: not supported with GLIDE, only {only}; leave it out")
    steps, topk, nodes = (getattr(args, name) for name in DEFAULT_TREE)
    most = most_nodes(topk, steps)
    if not steps < nodes <= most:
        raise UserError(
            f"--speculative-num-draft-tokens {nodes}: {steps} steps of top {topk} allow {steps + 1} to {most} tokens"
        )

    if config.model_type not in FAMILIES:
        raise UserError(f"{args.model_path}: a {config.model_type} target; GLIDE supports {', '.join(FAMILIES)}")
    layer = load_layer(args.speculative_draft_model_path, config)
    check_window(layer.window, steps, "--speculative-num-steps")
    if args.tp_size > 1:
        source, mlp_size = f"--tp-size {args.tp_size}", layer.options.mlp_size
        check_divisible(config, args.tp_size, source)
        if config.vocab_size % (64 * args.tp_size):
            raise UserError(f"{source}: SGLang pads a vocabulary of {config.vocab_size} tokens for it")
        if mlp_size and mlp_size % args.tp_size:
            raise UserError(f"{source}: must divide the draft's MLP size of {mlp_size}")


def load_layer(path: str, config: PreTrainedConfig) -> GlideDecoderLayer:
    """The draft at `path` for a target with `config`, frozen, on the CPU. Raises UserError if it does not fit."""
    family = class_of(config.model_type).draft_layer_class
    weights = check_draft(path, config, family, only=GLIDE)
    options: Any = draft_settings(path).options
    with torch.device("meta"):
        layer = family(config, options)
    for name in MAPS:
        layer.register_buffer(name, weights.get(name))
    layer.load_state_dict(weights, assign=True)
    return layer.requires_grad_(False).eval()


def suits_greedy_round(batch: Any) -> bool:
    """Whether a batch of SGLang needs nothing from a round but greedy tokens."""
    sampling = batch.sampling_info
    flags = batch.has_grammar, batch.return_logprob, batch.return_hidden_states, sampling.has_custom_logit_processor
    terms = sampling.acc_additive_penalties, sampling.acc_scaling_penalties, sampling.logit_bias
    return sampling.is_all_greedy and not any(flags) and all(term is None for term in terms)
