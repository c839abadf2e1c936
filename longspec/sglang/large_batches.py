"""Verification of trees: smaller ones in larger batches, with our attention kernel.

A GPU reads about a hundred tokens in the time of one, and more take longer. SGLang's Triton backend verifies trees with
its kernel for prefill: one program reads the whole prefix of a request and query head, after a copy of keys and values.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longspec.kernels.shared.attention import PagedPrefix, PagedTree

VERIFIED_TOKENS = 128
"""Number of tokens per verification, over all requests, up to which trees are whole."""
READ_TOKENS = 64
"""Number of nodes per level, over all requests, up to which the draft reads all of them."""
LEAST_NODES = 4
"""Smaller trees cost more than they accept; beyond that a round drafts nothing."""


def most_nodes(topk: int, steps: int) -> int:
    """Number of nodes of the whole tree, the root included."""
    return 1 + topk + topk * topk * (steps - 1)


class VerifySizes:
    """The tree of each batch size, and the target's CUDA graphs and attention backend for each number of nodes."""

    def __init__(self, steps: int, nodes: int, topk: int) -> None:
        self.steps, self.nodes, self.topk = steps, nodes, topk
        self.states: dict[int, tuple[Any, Any]] = {}
        """The target's attention backend and graphs by number of nodes."""

    def of(self, batch: int) -> tuple[int, int]:
        """(steps, nodes) of a round of `batch` requests: the whole tree, or its half, quarter … that fits; (0, 1) for
        rounds without a draft."""
        nodes = self.nodes
        while nodes >= LEAST_NODES and batch * nodes > VERIFIED_TOKENS:
            nodes //= 2
        if nodes == self.nodes:
            return self.steps, nodes
        if nodes < LEAST_NODES:
            return 0, 1
        # A level takes as long as in a whole tree, and fewer nodes reach fewer levels.
        levels = range(nodes.bit_length() - 1, nodes)
        return min(self.steps, next(steps for steps in levels if most_nodes(self.topk, steps) >= nodes)), nodes

    def shape(self, batch: int) -> tuple[int, ...]:
        """Number of nodes in each level below the root: its `topk` best children, then the `topk` ** 2 best
        continuations of a level, or as many as the verified nodes can hold next to their ancestors."""
        steps, nodes = self.of(batch)
        return tuple(min(self.topk if level == 0 else self.topk**2, nodes - 1 - level) for level in range(steps))

    def most_read(self, batch: int) -> int:
        """Number of nodes of a level that the draft reads, the best ones, which alone get children."""
        return max(self.topk, min(self.topk**2, READ_TOKENS // batch))

    def build(self, runner: Any, batch_sizes: list[int], attend: Callable[..., None]) -> None:
        """Make backend and graphs of the target for each number of nodes. runner: the target's. batch_sizes: those with
        graphs, empty without any. attend: see `verify_with`."""
        from sglang.srt.model_executor.runner import DecodeCudaGraphRunner  # this module also runs without SGLang

        self.states[self.nodes] = runner.attn_backend, runner.decode_cuda_graph_runner
        # Backends and graphs read SGLang's options when they are made.
        args, decode = runner.server_args, runner.server_args.cuda_graph_config.decode
        all_sizes, workspace = decode.bs, runner.init_new_workspace
        most = runner.req_to_token_pool.size
        for steps, nodes in sorted({self.of(batch) for batch in range(1, most + 1)} - {(self.steps, self.nodes)}):
            sizes = [batch for batch in batch_sizes if self.of(batch) == (steps, nodes)]
            args.speculative_num_steps, args.speculative_num_draft_tokens = steps, nodes
            decode.bs = sizes or all_sizes
            backend = runner._get_attention_backend(init_new_workspace=True)
            verify_with(backend, attend)
            self.states[nodes] = backend, DecodeCudaGraphRunner(runner, attn_backend=backend) if sizes else None
        args.speculative_num_steps, args.speculative_num_draft_tokens = self.steps, self.nodes
        decode.bs, runner.init_new_workspace = all_sizes, workspace


def verify_with(backend: Any, attend: Callable[..., None]) -> bool:
    """Let an attention backend of SGLang verify trees with `attend`, a `TritonAttention.paged`, if it is Triton's.
    Returns whether it is."""
    if not hasattr(backend, "extend_attention_fwd"):
        return False
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
    return True
