"""Plain torch stand-ins for the parts of SGLang 0.5.15 that the plugin calls, with their signatures.

Paths are relative to the package `sglang`; line numbers are those of version 0.5.15.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Kernel:
    """A function that is launched with a grid, as a Triton kernel."""

    def __init__(self, function: Callable[..., None]) -> None:
        self.function = function

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args: self.function(grid, *args)


def _write_indices(
    grid: tuple[int, ...],
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    page_kernel_lens: Tensor,
    kv_indptr: Tensor,
    kv_start_idx: None,
    kv_indices: Tensor,
    req_to_token_stride: int,
) -> None:
    assert kv_start_idx is None and req_to_token_stride == req_to_token.stride(0)
    for row in range(grid[0]):
        length, start = int(page_kernel_lens[row]), int(kv_indptr[row])
        kv_indices[start : start + length] = req_to_token[req_pool_indices[row], :length]


create_flashinfer_kv_indices_triton = Kernel(_write_indices)
"""srt/layers/attention/triton_ops/kv_indices.py, line 9"""


def decode_attention_fwd_grouped(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    o: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    attn_logits: Tensor,
    attn_lse: Tensor,
    num_kv_splits: Tensor,
    max_kv_splits: int,
    sm_scale_withk: float,
    v_scale: float,
) -> None:
    """srt/layers/attention/triton_ops/decode_attention.py, line 841; the remaining arguments have defaults."""
    batch, heads, width = q.shape
    group = heads // k_buffer.shape[1]
    # Blocks of 16 heads must not cross into the next KV head (line 382).
    assert group <= 16 or group % 16 == 0
    assert attn_logits.shape == (batch, heads, max_kv_splits, width) and attn_logits.dtype == torch.float32
    assert attn_lse.shape == attn_logits.shape[:3] and num_kv_splits.shape == (batch,)
    for row in range(batch):
        slots = kv_indices[kv_indptr[row] : kv_indptr[row + 1]]
        keys = k_buffer[slots].repeat_interleave(group, 1)
        values = v_buffer[slots].repeat_interleave(group, 1)
        weights = (torch.einsum("hd,shd->hs", q[row], keys) * sm_scale_withk).softmax(1)
        o[row] = torch.einsum("hs,shd->hd", weights, values) * v_scale


KERNELS = (create_flashinfer_kv_indices_triton, decode_attention_fwd_grouped)


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
