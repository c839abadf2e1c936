"""Attention of the draft to the target's paged keys and values, at the slots that SGLang's request table lists."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from longspec.kernels.shared.attention import PagedPrefix

PagedAttend = Callable[[Tensor, PagedPrefix, Tensor], None]
"""(q [B, H, n, D], prefix, out [B, n, H, D]): see `sglang.paged.PagedAttention`."""


class PrefixAttention:
    """Reads the pool of the target, whose buffers stay where they are."""

    def __init__(self, pool: Any, req_to_token: Tensor, attend: PagedAttend) -> None:
        """pool: SGLang's KV pool. req_to_token: contiguous IntTensor [requests, positions], the slot of each position
        of a request."""
        self.pool = pool
        self.slots = req_to_token.view(-1)
        self.positions = req_to_token.shape[1]
        self.attend = attend

    def plan(self, requests: Tensor, lengths: Tensor) -> Callable[[int, Tensor], Tensor]:
        """Attention to the first `lengths` positions of requests; both LongTensor [B].

        Returns the function: (number of the target's layer, q [B, H, n, D]) -> [B, H, n, D].
        """
        begins = requests * self.positions
        ends = begins + lengths

        def attend(layer: int, q: Tensor) -> Tensor:
            out = torch.empty_like(q.transpose(1, 2), memory_format=torch.contiguous_format)
            pools = self.pool.get_key_buffer(layer), self.pool.get_value_buffer(layer)
            self.attend(q, PagedPrefix(*pools, self.slots, begins, ends), out)
            return out.transpose(1, 2)

        return attend
