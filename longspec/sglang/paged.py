"""Attention to SGLang's paged cache by our kernel: that of the draft, and that of SGLang's verification of a tree.

SGLang's Triton backend verifies trees with its kernel for prefill, in which one program reads the whole prefix of a
request and query head. It has a slot for a faster kernel, which takes the arguments of `extend_attention_fwd` and
returns whether it has run.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from longspec.kernels.shared.attention import PagedPrefix, PagedTree
from longspec.kernels.shared.device import Gpu
from longspec.kernels.triton.attention_tiles import count_splits, prefix_tiles, programs_at_once
from longspec.kernels.triton.paged_attention import paged_attention


class PagedAttention:
    """The paged attention kernel, with tiles and parts for a device."""

    def __init__(self, gpu: Gpu, capacity: int) -> None:
        """capacity: largest length of a prefix."""
        self.gpu, self.capacity = gpu, capacity

    def __call__(self, q: Tensor, prefix: PagedPrefix, out: Tensor, tree: PagedTree | None = None) -> None:
        """See `paged_attention`; scores are q · k / sqrt(D)."""
        batch, heads, nodes, width = q.shape
        kv_heads = prefix.keys.shape[1]
        rows = heads // kv_heads * nodes
        memory = self.gpu.shared_memory
        tiles = prefix_tiles(rows, width, q.dtype, memory)
        at_once = programs_at_once(tiles, width, q.dtype, memory) * self.gpu.multiprocessors
        programs = batch * kv_heads * triton.cdiv(rows, tiles.block_m)
        parts = count_splits(programs, self.capacity, at_once)
        paged_attention(q, prefix, out, width**-0.5, parts, tiles, tree)

    def verify(self, q: Tensor, k: Tensor, v: Tensor, out: Tensor, *batch_and_pool: Any, **features: Any) -> bool:
        """Attention of B trees of N nodes, by the arguments of `extend_attention_fwd`
        (srt/layers/attention/triton_ops/extend_attention.py, line 622); False, without an effect, for what the kernel
        lacks.

        q, out [B * N, H, D]; k, v [B * N, K, D], those of the nodes.
        """
        keys, values, _, kv_starts, kv_slots, mask, _, mask_starts, nodes, k_scale, v_scale, scale = batch_and_pool
        batch, width = len(kv_starts) - 1, q.shape[2]
        if (
            mask is None
            or len(q) != batch * nodes
            or keys.dim() != 3
            or not out.is_contiguous()
            or (k_scale, v_scale) != (1.0, 1.0)
            or abs(scale * width**0.5 - 1) > 1e-6
            or max(features[name] for name in ("logit_cap", "sliding_window_size", "xai_temperature_len")) > 0
            or features["sinks"] is not None
        ):
            return False
        queries = q.view(batch, nodes, -1, width).transpose(1, 2)
        prefix = PagedPrefix(keys, values, kv_slots, kv_starts[:-1], kv_starts[1:])
        tree = PagedTree(k, v, mask, mask_starts[:-1])
        self(queries, prefix, out.view(batch, nodes, -1, width), tree)
        return True


def verify_with(backend: Any, attention: PagedAttention) -> None:
    """Let an attention backend of SGLang verify trees with `attention`, if it has the slot for it."""
    if hasattr(backend, "verify_splitkv_fwd"):
        backend.verify_splitkv_fwd = torch.compiler.disable(attention.verify)
        backend.use_verify_splitkv = True
