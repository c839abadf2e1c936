"""What a server with GLIDE cannot do, refused in one line before anything is loaded, and what a graph cannot."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

from longspec.errors import UserError
from longspec.models.draft_files import check_draft, draft_settings
from longspec.models.draft_layer import GLIDE, DraftOptions, check_window
from longspec.models.families import class_of
from longspec.models.target_split import check_divisible
from longspec.sglang.large_batches import most_nodes

FAMILIES = ("llama", "qwen2", "qwen3")
"""Supported targets by `model_type`: those whose layers all attend to the whole prefix."""
DEFAULT_TREE = {"speculative_num_steps": 5, "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 32}
ONLY = {
    "device": ("cuda",),
    "pp_size": (1,),
    "dcp_size": (1,),
    "attn_cp_size": (1,),
    "enable_dp_attention": (False,),
    "enable_two_batch_overlap": (False,),
    "enable_pdmux": (False,),
    "enable_hierarchical_cache": (False,),
    "enable_hisparse": (False,),
    "enable_unified_memory": (False,),
    "disaggregation_mode": ("null",),
    "kv_cache_dtype": ("auto",),
    "speculative_token_map": (None,),
}
"""Supported values of SGLang's options. The draft reads keys and values of the target where one GPU, or its tensor
parallel part, stores them in the model's dtype."""


def set_default_tree(args: Any) -> None:
    """Fill in the tree's options if none is given."""
    if all(getattr(args, name) is None for name in DEFAULT_TREE):
        for name, value in DEFAULT_TREE.items():
            setattr(args, name, value)


def check_server(args: Any, config: PreTrainedConfig) -> None:
    """Raise UserError unless a server with SGLang's options `args` and a target with `config` can run GLIDE."""
    if not args.speculative_draft_model_path:
        raise UserError("--speculative-draft-model-path: missing; give the draft's folder, file or hub id")
    for name, values in ONLY.items():
        value = getattr(args, name, values[0])
        if value not in values:
            flag = f"--{name.replace('_', '-')}"
            raise UserError(f"{flag} {value}: not supported with GLIDE, only {values[0]}; leave it out")
    _check_tree(args)

    if config.model_type not in FAMILIES:
        raise UserError(f"{args.model_path}: a {config.model_type} target; GLIDE supports {', '.join(FAMILIES)}")
    path = args.speculative_draft_model_path
    check_draft(path, config, class_of(config.model_type).draft_layer_class, only=GLIDE)
    options = draft_settings(path).options
    assert isinstance(options, DraftOptions)
    check_window(options.window, args.speculative_num_steps, "--speculative-num-steps")
    if args.tp_size > 1:
        check_divisible(config, args.tp_size, f"--tp-size {args.tp_size}")
        if config.vocab_size % (64 * args.tp_size):
            raise UserError(f"--tp-size {args.tp_size}: SGLang pads a vocabulary of {config.vocab_size} tokens for it")
        if options.mlp_size and options.mlp_size % args.tp_size:
            raise UserError(f"--tp-size {args.tp_size}: must divide the draft's MLP size of {options.mlp_size}")


def _check_tree(args: Any) -> None:
    steps, topk = args.speculative_num_steps, args.speculative_eagle_topk
    nodes = args.speculative_num_draft_tokens
    if None in (steps, topk, nodes) or min(steps, topk) < 1 or nodes < 2:
        raise UserError(
            "--speculative-num-steps, --speculative-eagle-topk and --speculative-num-draft-tokens: give all three, "
            "such as 5, 4 and 32, or none"
        )
    most = most_nodes(topk, steps)
    if not steps < nodes <= most:
        raise UserError(
            f"--speculative-num-draft-tokens {nodes}: {steps} steps of top {topk} allow {steps + 1} to {most} tokens"
        )


def suits_greedy_round(batch: Any) -> bool:
    """Whether a batch of SGLang needs nothing from a round but greedy tokens."""
    sampling = batch.sampling_info
    return bool(
        sampling.is_all_greedy
        and not (batch.has_grammar or batch.return_logprob or batch.return_hidden_states)
        and not sampling.has_custom_logit_processor
        and sampling.acc_additive_penalties is None
        and sampling.acc_scaling_penalties is None
        and sampling.logit_bias is None
    )
