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
        """like: the target's keys of one layer, [slots, K, D]. req_to_token: IntTensor [requests, positions], the slot
        of each position of a request."""
        # Zeros, because masked slots must be finite.
        self.keys, self.values = torch.zeros_like(like), torch.zeros_like(like)
        self.req_to_token = req_to_token
        self.window = window

    def store(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Store keys and values [T, K, D] in slots, LongTensor [T]."""
        self.keys[slots] = keys.to(self.keys.dtype)
        self.values[slots] = values.to(self.values.dtype)

    def slots(self, requests: Tensor, positions: Tensor) -> Tensor:
        """The slots, LongTensor [B, T], of positions [B, T] of requests, LongTensor [B]."""
        last = self.req_to_token.shape[1] - 1
        return self.req_to_token[requests[:, None], positions.clamp(0, last)].long()


class RoundWindow:
    """The window of one round: the last W keys of each request's prefix, then those of the tree's expanded nodes."""

    def __init__(self, cache: WindowCache, requests: Tensor, lengths: Tensor, nodes: int) -> None:
        """requests, lengths: LongTensor [B]; the prefix ends before position `lengths`. nodes: M."""
        self.width = cache.window
        self.positions = lengths[:, None] + torch.arange(-self.width, 0, device=lengths.device)
        slots = cache.slots(requests, self.positions)
        room = cache.keys.new_zeros(len(requests), nodes, *cache.keys.shape[1:])
        self.keys = torch.cat([cache.keys[slots], room], 1)
        self.values = torch.cat([cache.values[slots], room], 1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, level: int, first: int, visible: Tensor) -> Tensor:
        """Attention of one level's nodes, first … first + n - 1, whose keys and values join the window.

        q [B, H, n, D], k, v [B, K, n, D]; visible: bool [B, n, M]. Returns [B, H, n, D].
        """
        own = slice(self.width + first, self.width + first + k.shape[2])
        self.keys[:, own] = k.transpose(1, 2)
        self.values[:, own] = v.transpose(1, 2)
        # The query at position root + level sees itself and the W positions before it.
        offsets = torch.arange(self.width, device=q.device)
        in_window = (self.positions >= 0) & (offsets >= level)
        mask = torch.cat([in_window[:, None].expand(-1, q.shape[2], -1), visible], 2)
        return masked_attention(q, self.keys, self.values, mask)


def masked_attention(q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """q [B, H, n, D], keys and values [B, S, K, D], mask bool [B, n, S] -> [B, H, n, D]"""
    batch, heads, nodes, width = q.shape
    groups = heads // keys.shape[2]
    # The queries of a KV head are rows of one product: [B, K, G * n, D].
    rows = q.reshape(batch, -1, groups * nodes, width)
    scores = (rows @ keys.permute(0, 2, 3, 1)).float() * width**-0.5
    scores = scores.unflatten(2, (groups, nodes)).masked_fill(~mask[:, None, None], -torch.inf)
    weights = scores.softmax(-1).to(values.dtype).flatten(2, 3)
    return (weights @ values.transpose(1, 2)).view(batch, heads, nodes, width)
