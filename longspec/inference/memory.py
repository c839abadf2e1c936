"""The memory that a batch needs, estimated before the weights are loaded."""

from __future__ import annotations

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from longspec.errors import UserError
from longspec.inference.device import free_bytes
from longspec.inference.drafting.reduced_head import head_bytes
from longspec.inference.engine.rounds import CAPACITY_STEP
from longspec.models.draft_layer import head_dim

LOGIT_BYTES = 4
"""Size of a logit during verification."""
ACTIVATION_SHARE = 0.1
"""Share of the memory that the recommended batch size leaves to activations."""


def check_memory(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    rows: int,
    tokens: int,
    nodes: int,
    listed: int | None,
) -> None:
    """Raise UserError if the target with the KV cache and logits of a batch exceeds the free memory.

    rows: size of the largest batch. tokens: length of the longest prompt with its answer. nodes: verified per pass.
    listed: length of the draft's vocabulary list; None without one.
    """
    # A lower bound: activations and the draft's layer come on top.
    weights = weight_bytes(config, dtype)
    head = head_bytes(config, dtype, listed, rows)
    row = row_bytes(config, dtype, tokens, nodes)
    free = free_bytes(device)
    needed = weights + head + rows * row
    if needed <= free:
        return
    draft = f", the draft's head ({_gib(head)})" if head else ""
    problem = (
        f"the target ({_gib(weights)}){draft} and {rows} rows of {tokens} tokens and {nodes} tree nodes "
        f"({_gib(row)} each) need {_gib(needed)}, {device} has {_gib(free)} free"
    )
    if weights + head + row > free:
        raise UserError(f"{problem}; use fewer tokens (--max_gen_len), a smaller tree or --gamma, or a larger device")
    fitting_rows = max(1, int((free * (1 - ACTIVATION_SHARE) - weights - head) / row))
    raise UserError(f"--batch_size: {problem}; use --batch_size {fitting_rows} or less")


def row_bytes(config: PreTrainedConfig, dtype: torch.dtype, tokens: int, nodes: int) -> int:
    """Size of the KV cache and of the logits of one verification pass, per row."""
    # Keys and values of all layers per slot, and one fp32 logit per node and token of the vocabulary.
    slots = -(-(tokens + nodes) // CAPACITY_STEP) * CAPACITY_STEP
    return slots * slot_bytes(config, dtype) + nodes * config.vocab_size * LOGIT_BYTES


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


def _gib(size: float) -> str:
    return f"{size / 2**30:.3g} GiB"
