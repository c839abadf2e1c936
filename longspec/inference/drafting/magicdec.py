"""MagicDec (arXiv 2408.11049): the target drafts for itself over a sink and a recent window of its own cache."""

from __future__ import annotations

import torch
from torch import Tensor

from longspec.inference.cache import TargetCache
from longspec.inference.runner import Runner

SINK = 32
RECENT = 1024


class SparseTarget:
    """The target reading at most SINK + RECENT accepted tokens and the chain so far: a constant amount of KV.

    Its keys and values go behind the accepted ones, where verification overwrites them.
    """

    reads_hidden = False

    def __init__(self, runner: Runner, gamma: int) -> None:
        self.runner = runner
        self.gamma = gamma

    def start(self, prompts: Tensor, lengths: Tensor) -> None:
        pass  # the target's cache is all the state there is

    def feed(self, tokens: Tensor, positions: Tensor, valid: Tensor) -> None:
        pass

    def next_logits(self, tokens: Tensor, step: int, cache: TargetCache) -> Tensor:
        """Logits [B, V] after tokens [B], node `step` of the chain."""
        slots, visible = self._view(cache.lengths, step, capacity=cache.keys.shape[3])
        cache.slots = (cache.lengths.long() + step)[:, None]

        def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> Tensor:
            k, v = (store[cache.rows, :, slots].transpose(1, 2) for store in (keys, values))
            return self.runner.attention.masked(q, k, v, visible[:, None], scale)

        return self.runner.logits(self.runner.target(tokens[:, None], cache.slots, cache, attend))[:, 0]

    def _view(self, lengths: Tensor, step: int, capacity: int) -> tuple[Tensor, Tensor]:
        """Slots [B, SINK + RECENT + gamma] to read and which of them count, bool of the same shape."""
        device = lengths.device
        root = lengths[:, None]
        sink = torch.arange(SINK, device=device).expand(len(lengths), -1)
        recent = root + torch.arange(-RECENT, 0, device=device)
        nodes = root + torch.arange(self.gamma, device=device)
        slots = torch.cat([sink, recent, nodes], 1)
        visible = torch.cat([sink < root, recent >= SINK, nodes <= root + step], 1)
        return slots.clamp(0, capacity - 1), visible
