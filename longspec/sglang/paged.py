"""SGLang's verification of a tree by our kernel.

SGLang's Triton backend verifies trees with its kernel for prefill, in which one program reads the whole prefix of a
request and query head, after copying keys and values out of the product that made them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longspec.kernels.shared.attention import PagedPrefix, PagedTree


def is_triton(backend: Any) -> bool:
    """Whether an attention backend of SGLang is Triton's."""
    return hasattr(backend, "extend_attention_fwd")


def verify_with(backend: Any, attend: Callable[..., None]) -> None:
    """Let an attention backend of SGLang verify trees with `attend`, a `TritonAttention.paged`, if it is Triton's."""
    if not is_triton(backend):
        return
    original = backend.forward_extend

    # In place of `TritonAttnBackend.forward_extend` (srt/layers/attention/triton_backend.py, line 1205), which also
    # takes what the kernel lacks. Pools of other kinds than ours are refused at the start (see `checks`).
    @torch.compiler.disable
    def forward_extend(
        q: Tensor, k: Tensor, v: Tensor, layer: Any, batch: Any, save_kv_cache: bool = True, sinks: Any = None
    ) -> Tensor:
        metadata = backend.forward_metadata
        starts, nodes, width = metadata.kv_indptr, metadata.max_extend_len, layer.qk_head_dim
        if (
            not (batch.forward_mode.is_target_verify() and save_kv_cache)
            or layer.k_scale is not None
            or metadata.custom_mask is None
            or len(q) != (len(starts) - 1) * nodes
            or abs(layer.scaling * width**0.5 - 1) > 1e-6
            or max(layer.logit_cap, layer.sliding_window_size, layer.xai_temperature_len) > 0
            or sinks is not None
        ):
            return original(q, k, v, layer, batch, save_kv_cache, sinks=sinks)
        pool = backend.token_to_kv_pool
        pool.set_kv_buffer(layer, batch.out_cache_loc, k, v)
        pools = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        out = q.new_empty(q.shape)
        heads = (-1, nodes, layer.tp_q_head_num, width)
        prefix = PagedPrefix(*pools, metadata.kv_indices, starts[:-1], starts[1:])
        tree = PagedTree(k, v, metadata.custom_mask, metadata.mask_indptr[:-1])
        attend(q.view(heads).transpose(1, 2), prefix, out.view(heads), tree)
        return out

    backend.forward_extend = forward_extend
