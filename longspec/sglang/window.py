"""The draft's own keys and values, stored by KV slot, and its attention to the window.

They depend on a token and its position alone, and so does the slot's content: a slot that SGLang shares between
requests (radix cache), keeps between chunks of a prefill or moves to another request holds the right ones.
"""

from __future__ import annotations

import torch
from torch import Tensor


class WindowCache:
    """Keys and values [slots, K, D] for all slots of the target's pool."""

    def __init__(self, like: Tensor, req_to_token: Tensor, window: int) -> None:
        """like: the target's keys of one layer, [slots, K, D]. req_to_token: contiguous IntTensor [requests,
        positions], the slot of each position of a request."""
        # Zeros, because masked slots must be finite.
        self.keys, self.values = torch.zeros_like(like), torch.zeros_like(like)
        self.req_to_token = req_to_token
        self.window = window

    @property
    def as_row(self) -> tuple[Tensor, Tensor]:
        """Keys and values as those of one sequence, [1, K, slots, D]."""
        return self.keys.transpose(0, 1)[None], self.values.transpose(0, 1)[None]

    def slots(self, requests: Tensor, positions: Tensor) -> Tensor:
        """The slots, LongTensor [B, T], of positions [B, T] of requests, LongTensor [B]."""
        last = self.req_to_token.shape[1] - 1
        return self.req_to_token[requests[:, None], positions.clamp(0, last)].long()

    def round(self, requests: Tensor, lengths: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, K, W + M, D] for one round, as the backends' window attention reads them: slot s < W
        holds the newest position p of the prefix with p % W == s, and the slots from W on are free for M nodes.

        requests, lengths: LongTensor [B]; the prefix ends before position `lengths`. nodes: M.
        """
        newest = lengths[:, None] - 1
        age = (newest - torch.arange(self.window, device=lengths.device)) % self.window
        slots = self.slots(requests, newest - age)
        room = self.keys.new_zeros(len(requests), nodes, *self.keys.shape[1:])
        keys, values = (torch.cat([store[slots], room], 1).transpose(1, 2) for store in (self.keys, self.values))
        return keys, values
