"""The arithmetic that a training micro-batch needs, whatever a program does besides: recomputation does not count."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.floors import draft_weights, layer_weights
from longspec.models.draft_layer import WINDOW, head_dim


class Flops(NamedTuple):
    """Floating-point operations of one micro-batch by part."""

    target: float
    draft_forward: float
    draft_backward: float
    loss: float
    """Logits, their gradient with respect to the hidden states, and the target's logits where they are read."""

    @property
    def total(self) -> float:
        return sum(self)


def training_flops(config: Any, segments: Sequence[int], scored: int, reads_target: bool) -> Flops:
    """Of packed segments of so many tokens each, `scored` tokens of which are in the loss.

    A product of weights costs 2 operations a number and token, attention 4 · heads · head_dim a visible pair: causal
    masks are counted once, without the part they hide. The target's last layer has no more than its keys and values if
    nothing reads its hidden states. Backward costs a product twice (input and weight); attention costs it twice too,
    but over the target's keys and values, which are frozen, once. The head is frozen: logits cost twice, to and back.
    """
    tokens, width = sum(segments), head_dim(config)
    pair = 4 * config.num_attention_heads * width
    causal = sum(length * (length + 1) // 2 for length in segments)
    layer = 2 * layer_weights(config) * tokens + pair * causal
    keys_values = 2 * 2 * config.hidden_size * config.num_key_value_heads * width * tokens
    target = config.num_hidden_layers * layer if reads_target else (config.num_hidden_layers - 1) * layer + keys_values
    products, window, cross = 2 * draft_weights(config) * tokens, pair * _windowed_pairs(segments), pair * causal
    logits = 2 * config.vocab_size * config.hidden_size * scored
    return Flops(
        target=target,
        draft_forward=products + window + cross,
        draft_backward=2 * products + 2 * window + cross,
        loss=(3 if reads_target else 2) * logits,
    )


def _windowed_pairs(segments: Sequence[int]) -> int:
    """Query i of a segment sees keys i - WINDOW … i."""
    short = [min(length, WINDOW) for length in segments]
    return sum(n * (n + 1) // 2 + (length - n) * (WINDOW + 1) for n, length in zip(short, segments, strict=True))
