"""The GLIDE draft while decoding: its ring of accepted tokens and the forward pass of one level of nodes."""

from __future__ import annotations

import torch
from torch import Tensor

from longspec.inference.cache import DraftCache, TargetCache
from longspec.kernels.attention import masked_attention, prefix_only_attention
from longspec.models.draft_layer import WINDOW
from longspec.models.glide import GlideMixin


class GlideDraft:
    """The draft of `model` for a batch; it reads the target's cache up to the root, however deep the level."""

    def __init__(self, model: GlideMixin, batch: int, nodes: int) -> None:
        self.model = model
        weight = model.lm_head.weight
        self.cache = DraftCache(model.config, batch, WINDOW, nodes, weight.dtype, weight.device)
        self.scale = model.draft_model.self_attn.head_dim**-0.5

    def start(self, prompts: Tensor, lengths: Tensor) -> None:
        """Prefill: keys and values of each prompt's last W tokens. prompts [B, P] padded right, lengths [B]."""
        offsets = torch.arange(-WINDOW, 0, device=prompts.device)
        positions = lengths[:, None] + offsets
        tokens = prompts.gather(1, positions.clamp(min=0))
        self.feed(tokens, positions, positions >= 0)

    def feed(self, tokens: Tensor, positions: Tensor, valid: Tensor) -> None:
        """Put certain tokens [B, T] at consecutive positions [B, T] into the ring, where valid."""
        embeddings, rope = self.model.embed(tokens, positions.clamp(min=0))
        self.cache.append(*self.model.draft_model.keys_values(embeddings, rope), positions, valid)

    def level(self, tokens: Tensor, level: int, first: int, visible: Tensor, cache: TargetCache) -> Tensor:
        """The draft's logits [B, n, V] at the n nodes of one level.

        tokens: LongTensor [B, n]; their level is `level` and their numbers first … first + n - 1; visible: bool
        [B, n, N], the nodes each one sees. Its lag to the target's cache is level + 1 (SPEC 2).
        """
        root = cache.lengths
        positions = (root + level)[:, None].expand_as(tokens)
        embeddings, rope = self.model.embed(tokens, positions)
        mask = torch.cat([self.cache.ring_visible(root, positions), visible], dim=-1)

        def self_attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            self.cache.write_nodes(k, v, first)
            return masked_attention(q, self.cache.keys, self.cache.values, mask, self.scale)

        def cross_attend(q: Tensor) -> Tensor:
            keys, values = cache.last_layer
            return prefix_only_attention(q, keys, values, root, self.scale, cache.max_length)

        hidden = self.model.draft_model(embeddings, rope, self_attend, cross_attend)
        return self.model.lm_head(hidden)

    def next_logits(self, tokens: Tensor, step: int, cache: TargetCache) -> Tensor:
        """The logits [B, V] that follow tokens [B], node `step` of a chain."""
        nodes = self.cache.keys.shape[2] - WINDOW
        visible = torch.arange(nodes, device=tokens.device) <= step
        return self.level(tokens[:, None], step, step, visible.expand(len(tokens), 1, -1), cache)[:, 0]
