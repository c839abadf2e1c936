"""Plain torch stand-ins for the parts of SGLang 0.5.15 that the plugin calls, with their signatures.

Paths are relative to the package `sglang`; line numbers are those of version 0.5.15.
"""

from __future__ import annotations

from typing import Any

import attention_reference
from torch import Tensor

from longspec.kernels.shared.attention import PagedPrefix


def paged_attention(q: Tensor, prefix: PagedPrefix, out: Tensor) -> None:
    """`TritonAttention.paged` without a tree, in plain torch."""
    attention_reference.paged_attention(q, prefix, out, q.shape[3] ** -0.5)


class Pool:
    """`MHATokenToKVPool`, srt/mem_cache/memory_pool.py, line 1291: keys and values [slots, K, D] of each layer."""

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        """keys, values: [layers, slots, K, D]"""
        self.keys, self.values = keys, values

    def get_key_buffer(self, layer_id: int) -> Tensor:
        return self.keys[layer_id]

    def get_value_buffer(self, layer_id: int) -> Tensor:
        return self.values[layer_id]


def parents_of(parent_list: Tensor, selected_index: Tensor, topk: int) -> list[int]:
    """The position of each verified node's parent among the nodes of one request, where the root is 0.

    As `build_tree_kernel_efficient` finds it: srt/speculative/triton_ops/spec_tree.py, lines 66 to 88.
    """
    chosen = selected_index.tolist()
    numbers: list[Any] = parent_list.tolist()
    return [0 if number // topk == 0 else chosen.index(numbers[number // topk]) + 1 for number in chosen]
