"""MagicDec (arXiv 2408.11049): the target drafts for itself, attending to a sink and recent tokens only."""

import torch
from torch import Tensor

from longspec.inference.cache import TargetCache
from longspec.inference.drafting.decoder import DraftDecoder

SINK = 32
"""Number of tokens at the beginning that stay visible."""
RECENT = 1024
"""Number of tokens before the root that stay visible."""


class SparseTarget(DraftDecoder):
    """The target, reading a constant number of KV entries: SINK + RECENT accepted tokens and the chain so far. Its own
    keys and values go to the slots after the accepted tokens, where verification overwrites them."""

    def next_logits(self, tokens: Tensor, step: int, cache: TargetCache, feature: Tensor | None) -> Tensor:
        read_slots, visible = self._view(cache.lengths, step, capacity=cache.keys.shape[3])
        positions = (cache.lengths.long() + step)[:, None]

        def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
            read_keys = keys[cache.rows, :, read_slots].transpose(1, 2)
            read_values = values[cache.rows, :, read_slots].transpose(1, 2)
            return self.runner.attention.masked(q, read_keys, read_values, visible[:, None], scale)

        # A token at position p is stored in slot p.
        hidden = self.runner.target(tokens[:, None], positions, cache, positions, attend)
        return self.runner.logits(hidden)[:, 0]

    def _view(self, lengths: Tensor, step: int, capacity: int) -> tuple[Tensor, Tensor]:
        """The slots to read, LongTensor [B, SINK + RECENT + nodes], and which of them are visible, bool of that shape.
        The shape is static. If a row is short, recent slots that overlap the sink or precede slot 0 are masked."""
        device = lengths.device
        root = lengths[:, None]
        sink = torch.arange(SINK, device=device).expand(len(lengths), -1)
        recent = root + torch.arange(-RECENT, 0, device=device)
        nodes = root + torch.arange(self.nodes, device=device)
        slots = torch.cat([sink, recent, nodes], 1)
        visible = torch.cat([sink < root, recent >= SINK, nodes <= root + step], 1)
        return slots.clamp(0, capacity - 1), visible
