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
    kv_width, head_width = (
        heads * head_dim(config) for heads in (config.num_key_value_heads, config.num_attention_heads)
    )

    def products(weights: int, tokens: int) -> float:
        return ceilings.floor_ms(BYTES * weights, 2 * weights * tokens)

    def attention(lengths: Sequence[int], queries: int) -> float:
        return sum(ceilings.floor_ms(2 * BYTES * kv_width * n, 4 * head_width * n * queries) for n in lengths)

    def lm_head(tokens: int, columns: int | None = None) -> float:
        return products((columns or config.vocab_size) * config.hidden_size, tokens)

    def target_pass(lengths: Sequence[int], nodes: int) -> float:
        tokens = len(lengths) * nodes
        layer = products(layer_weights(config), tokens) + attention(lengths, nodes)
        return config.num_hidden_layers * layer + lm_head(tokens)

    batch = len(lengths)
    total = target_pass(lengths, verified or 1 + sum(widths))
    for width in [1, *widths[:-1]] if widths else []:
        if drafted_by == "target":
            total += target_pass([min(length, SINK + RECENT) for length in lengths], width)
        elif drafted_by == "glide":
            total += products(draft_weights(config), batch * width) + attention(lengths, width)
            total += lm_head(batch * width, columns)
    return total


def layer_weights(config: Any) -> int:
    """Number of weights in the matrices of one target layer."""
    heads = 2 * config.num_attention_heads + 2 * config.num_key_value_heads
    return config.hidden_size * (heads * head_dim(config) + 3 * config.intermediate_size)


def draft_weights(config: Any) -> int:
    """Number of weights in the draft layer: a target layer plus the cross-attention's query and output projections."""
    return layer_weights(config) + 2 * config.hidden_size * config.num_attention_heads * head_dim(config)
