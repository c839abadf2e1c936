"""The memory that a batch needs, and what fits into a budget: rows, and cache slots per row."""

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from longspec.errors import UserError
from longspec.inference.device import free_bytes
from longspec.inference.drafting.reduced_head import head_bytes
from longspec.inference.engine.rounds import CAPACITY_STEP
from longspec.models.draft_layer import head_dim
from longspec.models.target_files import position_limit

SHARE = 0.9
"""Share of the free memory that the default budget takes."""
ROUND_BYTES = 64
"""Bytes per node and token of the vocabulary in a round: logits, probabilities, noise, and what sorting them takes."""


def check_memory(
    config: PreTrainedConfig, dtype: torch.dtype, device: torch.device, tokens: int, nodes: int, listed: int | None
) -> None:
    """Raise UserError if the target with the KV cache and logits of one row, of `tokens` tokens and `nodes` nodes per
    pass, exceeds the free memory. listed: length of the draft's vocabulary list or None. A lower bound."""
    row = row_bytes(config, dtype, tokens, nodes) + head_bytes(config, dtype, listed, 1)
    needed, free = weight_bytes(config, dtype) + row, free_bytes(device)
    if needed > free:
        raise UserError(
            f"the target and a row of {tokens} tokens and {nodes} tree nodes need {needed / 2**30:.3g} GiB, {device} "
            f"has {free / 2**30:.3g} GiB free; use fewer tokens (--max_gen_len), a smaller tree or a larger device"
        )


def row_bytes(config: PreTrainedConfig, dtype: torch.dtype, tokens: int, nodes: int) -> int:
    """Size of the KV cache and of the logits of one verification pass, per row."""
    logits = nodes * config.vocab_size * torch.float32.itemsize
    return slots_for(tokens, -1, nodes) * slot_bytes(config, dtype) + logits


def row_capacity(memory: int, fixed: int, rows: int, most: int, row: int, slot: int) -> int:
    """Cache slots per row: `most`, or fewer if the rows, of `row` and per slot `slot` bytes, would exceed the `memory`
    without its `fixed` part. Raises UserError below one step of the cache's size."""
    slots = ((memory - fixed) // rows - row) // slot
    slots -= slots % CAPACITY_STEP
    if slots < CAPACITY_STEP:
        raise UserError(
            f"memory: {memory / 2**30:.3g} GiB hold less than {CAPACITY_STEP} tokens in each of {rows} rows; "
            "use fewer rows, a smaller tree, shorter prefill chunks, or more memory"
        )
    return min(slots, most)


def slots_for(room: int, depth: int, nodes: int) -> int:
    """Cache slots of a row for a prompt and its answer of `room` tokens, with rounds of this depth and these nodes."""
    # The last round can go depth + 1 tokens past the limit, and its nodes are stored after the accepted tokens.
    return -(-(room + depth + 1 + nodes) // CAPACITY_STEP) * CAPACITY_STEP


def chunk_bytes(config: PreTrainedConfig, dtype: torch.dtype, tokens: int) -> int:
    """Estimate of the activations of prefill passes over at most `tokens` tokens of a row. Attention and MLP of a layer
    count as if they ran at the same time; the difference covers workspaces of kernels."""
    tokens = min(tokens, position_limit(config))
    stream = 2 * config.hidden_size  # hidden states before and after a norm
    # Queries, keys and values of the merged projection; rotated queries; output.
    attention = (3 * config.num_attention_heads + 2 * config.num_key_value_heads) * head_dim(config)
    mlp = 3 * config.intermediate_size  # gate, up and their product
    # Twice, because the first pass, which compiles the kernels, and the captured ones allocate from different pools.
    return 2 * tokens * (stream + attention + mlp) * dtype.itemsize


def slot_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Size of the keys and values of one token in all layers."""
    return 2 * config.num_hidden_layers * config.num_key_value_heads * head_dim(config) * dtype.itemsize


def weight_bytes(config: PreTrainedConfig, dtype: torch.dtype) -> int:
    """Size of the target's weights; 0 for a quantized target, whose size depends on the quantization method."""
    if getattr(config, "quantization_config", None) is not None:
        return 0
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(config)
    return sum(weight.numel() for weight in target.parameters()) * dtype.itemsize
