"""Floating-point operations that a training micro-batch requires. Recomputation is not counted."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.floors import draft_weights, layer_weights
from longspec.models.draft_layer import WINDOW, head_dim


class Flops(NamedTuple):
    """Floating-point operations per part of one micro-batch."""

    target: float
    draft_forward: float
    draft_backward: float
    loss: float
    """Draft logits, their gradient with respect to the hidden states, and target logits if the loss reads them."""


def training_flops(config: Any, segments: Sequence[int], scored: int, reads_target: bool) -> Flops:
    """Operations for packed segments of `segments` tokens each, `scored` tokens of which are in the loss.

    Forward: a matrix product takes 2 operations per weight and token. Attention takes 4 · H · D per pair of a query and
    a visible key; masked pairs are not counted. reads_target: whether the loss reads the target's hidden states.

    Backward: a product takes twice its forward cost (gradients of input and weight), and so does self-attention.
    Cross-attention takes its forward cost once, because the target's keys and values are frozen. lm_head is frozen
    too: its backward pass computes only the gradient of the hidden states.
    """
    tokens = sum(segments)
    width = head_dim(config)
    pair = 4 * config.num_attention_heads * width
    causal = sum(length * (length + 1) // 2 for length in segments)

    layer = 2 * layer_weights(config) * tokens + pair * causal
    target = config.num_hidden_layers * layer

    products = 2 * draft_weights(config) * tokens
    window = pair * _windowed_pairs(segments)
    cross = pair * causal
    logits = 2 * config.vocab_size * config.hidden_size * scored
    return Flops(
        target=target,
        draft_forward=products + window + cross,
        draft_backward=2 * products + 2 * window + cross,
        loss=(3 if reads_target else 2) * logits,
    )


def _windowed_pairs(segments: Sequence[int]) -> int:
    """Number of query-key pairs in the draft's windows: query i of a segment sees keys i - WINDOW to i."""
    pairs = 0
    for length in segments:
        growing = min(length, WINDOW)  # queries that see all keys before them
        pairs += growing * (growing + 1) // 2 + (length - growing) * (WINDOW + 1)
    return pairs
