"""Lower bound on the time of a decoding round.

Each pass reads every weight, key and value once, and every matrix product runs at the full rate of the device.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks.ceilings import Ceilings
from longspec.inference.drafting.magicdec import RECENT, SINK
from longspec.models.draft_layer import head_dim
from longspec.models.target_split import rank_config

BYTES = 2
"""Size of one bf16 number."""


def round_floor_ms(
    config: Any,
    ceilings: Ceilings,
    lengths: Sequence[int],
    widths: Sequence[int],
    drafted_by: str,
    verified: int | None = None,
    columns: int | None = None,
    ranks: int = 1,
) -> float:
    """Milliseconds of a round, summed over its parts.

    The parts are the products of each target layer, its attention (per row), the draft layer and lm_head. A part takes
    as long as moving its bytes or doing its arithmetic, whichever is longer.

    lengths: cached tokens per row. widths: nodes per level of the tree; () is a vanilla step. drafted_by: "glide",
    "target" (magicdec, which attends to a constant number of tokens), or "nothing" if drafting takes no device time.
    verified: nodes that the target reads, the root included; None for the whole tree. columns: rows of lm_head that a
    GLIDE draft reads; None for all. ranks: number of ranks that share target and draft; the floor is that of one rank,
    without communication.
    """
    config = rank_config(config, 0, ranks)
    batch = len(lengths)
    nodes = verified or 1 + sum(widths)
    total = _pass_ms(config, ceilings, lengths, nodes)
    above = [1, *widths[:-1]] if widths else []
    for width in above:
        if drafted_by == "target":
            total += _pass_ms(config, ceilings, [min(length, SINK + RECENT) for length in lengths], width)
        elif drafted_by == "glide":
            total += _products_ms(ceilings, draft_weights(config), batch * width)
            total += sum(_attention_ms(config, ceilings, length, width) for length in lengths)
            total += _lm_head_ms(config, ceilings, batch * width, columns)
    return total


def _pass_ms(config: Any, ceilings: Ceilings, lengths: Sequence[int], nodes: int) -> float:
    attention = sum(_attention_ms(config, ceilings, length, nodes) for length in lengths)
    layer = _products_ms(ceilings, layer_weights(config), len(lengths) * nodes) + attention
    return config.num_hidden_layers * layer + _lm_head_ms(config, ceilings, len(lengths) * nodes)


def _products_ms(ceilings: Ceilings, weights: int, tokens: int) -> float:
    return ceilings.floor_ms(BYTES * weights, 2 * weights * tokens)


def _lm_head_ms(config: Any, ceilings: Ceilings, tokens: int, columns: int | None = None) -> float:
    return _products_ms(ceilings, (columns or config.vocab_size) * config.hidden_size, tokens)


def _attention_ms(config: Any, ceilings: Ceilings, length: int, queries: int) -> float:
    width = head_dim(config)
    kv_bytes = 2 * BYTES * config.num_key_value_heads * width * length
    return ceilings.floor_ms(kv_bytes, 4 * config.num_attention_heads * width * length * queries)


def layer_weights(config: Any) -> int:
    """Number of weights in the matrices of one target layer."""
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    return config.hidden_size * (heads * head_dim(config) + 3 * config.intermediate_size)


def draft_weights(config: Any) -> int:
    """Number of weights in the draft layer: a target layer plus the cross-attention's query and output projections."""
    return layer_weights(config) + 2 * config.hidden_size * config.num_attention_heads * head_dim(config)
