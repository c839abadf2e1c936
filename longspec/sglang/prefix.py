"""Attention of the draft to the target's paged keys and values, by SGLang's split-KV decoding kernel.

The kernel has one query per request and KV head group. All nodes of a level read the same prefix, so they are passed
as further query heads of the group: each key is read once for all of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

BLOCK = 16
"""Query heads per program of the kernel; a larger group must be a multiple of it."""


def kv_splits(batch: int) -> int:
    """Number of parts into which the kernel cuts the prefix: few requests alone do not fill a GPU."""
    return 32 if batch < 8 else 8


class PrefixAttention:
    """Reads the pool of the target, whose buffers stay where they are."""

    def __init__(
        self, pool: Any, req_to_token: Tensor, requests: int, kernels: tuple[Any, Callable[..., None]]
    ) -> None:
        """pool: SGLang's KV pool. requests: largest batch. kernels: `create_flashinfer_kv_indices_triton` and
        `decode_attention_fwd_grouped` of SGLang."""
        self.pool = pool
        self.req_to_token = req_to_token
        self.write_indices, self.attention = kernels
        device = req_to_token.device
        self.starts = torch.zeros(requests + 1, dtype=torch.int32, device=device)
        # The sum of all prefixes can exceed the pool, because requests share slots.
        self.indices = torch.zeros(requests * req_to_token.shape[1], dtype=torch.int64, device=device)

    def plan(self, requests: Tensor, lengths: Tensor) -> Callable[[int, Tensor], Tensor]:
        """List the slots of each request's prefix. requests, lengths: LongTensor [B].

        Returns the attention function: (number of the target's layer, q [B, H, n, D]) -> [B, H, n, D].
        """
        batch = len(requests)
        starts = self.starts[: batch + 1]
        starts[1:] = lengths.cumsum(0)
        self.write_indices[(batch,)](
            self.req_to_token, requests, lengths, starts, None, self.indices, self.req_to_token.stride(0)
        )
        splits = torch.full((batch,), kv_splits(batch), dtype=torch.int32, device=lengths.device)
        return lambda layer, q: self._attend(layer, q, starts, splits)

    def _attend(self, layer: int, q: Tensor, starts: Tensor, splits: Tensor) -> Tensor:
        keys, values = self.pool.get_key_buffer(layer), self.pool.get_value_buffer(layer)
        batch, heads, nodes, width = q.shape
        kv_heads = keys.shape[1]
        group = heads // kv_heads * nodes
        padding = -group % BLOCK if group > BLOCK else 0
        rows = F.pad(q.reshape(batch, kv_heads, group, width), (0, 0, 0, padding)).flatten(1, 2)

        most = kv_splits(batch)
        parts = rows.new_empty(*rows.shape[:2], most, width, dtype=torch.float32)
        lse = rows.new_empty(*rows.shape[:2], most, dtype=torch.float32)
        out = torch.empty_like(rows)
        self.attention(
            rows, keys, values, out, starts, self.indices, parts, lse, splits, most, width**-0.5, 1.0
        )  # 1.0: the scale of unquantized values
        return out.unflatten(1, (kv_heads, -1))[:, :, :group].reshape(batch, heads, nodes, width)
