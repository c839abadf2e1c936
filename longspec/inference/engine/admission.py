"""Capacity: cache slots per row within a memory budget, and the checks of a request before it is queued."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig

from longspec.errors import UserError
from longspec.inference.arguments import check_sampling, check_seed
from longspec.inference.engine.requests import Request, RequestTooLarge
from longspec.inference.engine.rounds import CAPACITY_STEP
from longspec.inference.memory import slot_bytes
from longspec.inference.request import FILTERS
from longspec.inference.token_options import check_penalties
from longspec.models.draft_layer import head_dim
from longspec.models.target_files import position_limit

SHARE = 0.9
"""Share of the free memory that the default budget takes."""
ROUND_BYTES = 64
"""Bytes per node and token of the vocabulary in a round: logits, probabilities, noise, and what sorting them takes."""


def row_capacity(
    config: PreTrainedConfig,
    dtype: torch.dtype,
    rows: int,
    nodes: int,
    memory: int,
    fixed: int,
    longest: int,
    draft: tuple[int, int],
) -> int:
    """Cache slots per row: enough for requests of `longest` tokens, or fewer if `rows` rows would exceed `memory`.

    nodes: read per round and row; memory: bytes; fixed: bytes of it that do not depend on the capacity; draft: see
    `DraftDecoder.state_bytes`. Raises UserError if the memory does not even suffice for one step of the cache's size.
    """
    slots = (memory - fixed) // rows - nodes * config.vocab_size * ROUND_BYTES - draft[0]
    slots //= slot_bytes(config, dtype) + draft[1]
    slots -= slots % CAPACITY_STEP
    if slots < CAPACITY_STEP:
        raise UserError(
            f"memory: {memory / 2**30:.3g} GiB hold less than {CAPACITY_STEP} tokens in each of {rows} rows; "
            "use fewer rows, a smaller tree, shorter prefill chunks, or more memory"
        )
    return min(slots, slots_for(longest, nodes - 1, nodes))


def fitting_rows(
    config: PreTrainedConfig, dtype: torch.dtype, longest: int, nodes: int, memory: int, draft: tuple[int, int]
) -> int:
    """Rows, at least 1, for requests of `longest` tokens within `memory` bytes; nodes, draft as in `row_capacity`."""
    row = slots_for(longest, nodes - 1, nodes) * (slot_bytes(config, dtype) + draft[1])
    return max(1, memory // (row + draft[0] + nodes * config.vocab_size * ROUND_BYTES))


def slots_for(room: int, depth: int, nodes: int) -> int:
    """Cache slots of a row for a prompt and its answer of `room` tokens, with rounds of this depth and these nodes."""
    # The last round can go depth + 1 tokens past the limit, and its nodes are stored after the accepted tokens.
    return -(-(room + depth + 1 + nodes) // CAPACITY_STEP) * CAPACITY_STEP


def chunk_bytes(config: PreTrainedConfig, dtype: torch.dtype, tokens: int) -> int:
    """Estimate of the activations of prefill passes over at most `tokens` tokens of a row.

    Attention and MLP of a layer count as if they ran at the same time; the difference covers workspaces of kernels.
    """
    tokens = min(tokens, position_limit(config))
    stream = 2 * config.hidden_size  # hidden states before and after a norm
    # Queries, keys and values of the merged projection; rotated queries; output.
    attention = (3 * config.num_attention_heads + 2 * config.num_key_value_heads) * head_dim(config)
    mlp = 3 * config.intermediate_size  # gate, up and their product
    # Twice, because the first pass, which compiles the kernels, and the captured ones allocate from different pools.
    return 2 * tokens * (stream + attention + mlp) * dtype.itemsize


def longest_request(config: PreTrainedConfig, capacity: int, depth: int, nodes: int) -> int:
    """Tokens of prompt and answer together that fit into a row of `capacity` slots and the target's positions."""
    # The last round can go depth + 1 tokens past the limit, and its nodes are stored after the accepted tokens.
    return min(position_limit(config), capacity - depth - 1 - nodes)


def check_request(request: Request, config: PreTrainedConfig, limit: int) -> None:
    """Raise RequestTooLarge for a request of more than `limit` tokens, UserError if it is malformed."""
    sampling = request.sampling
    check_sampling(request.max_new_tokens, sampling.temperature, **{name: getattr(sampling, name) for name in FILTERS})
    check_penalties(sampling, config.vocab_size)
    check_seed(sampling.seed)
    if not request.prompt:
        raise UserError("prompt: empty; it needs at least one token")
    for token in (min(request.prompt), max(request.prompt)):
        if not 0 <= token < config.vocab_size:
            raise UserError(f"prompt: token id {token}; the target has {config.vocab_size}")
    if request.longest > limit:
        raise RequestTooLarge(
            f"prompt of {len(request.prompt)} tokens + max_new_tokens {request.max_new_tokens}: "
            f"{request.longest} tokens, more than the {limit} of a row"
        )
