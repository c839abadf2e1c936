"""The GLIDE draft during decoding: its window of accepted tokens, and the forward pass of one level of a tree."""

from __future__ import annotations

from copy import copy
from functools import partial

import torch
from torch import Tensor

from longspec.inference.cache import DraftCache, TargetCache
from longspec.inference.drafting.reduced_head import ReducedHead
from longspec.inference.runner import Runner
from longspec.models.draft_layer import head_dim


class GlideDraft:
    """The draft for one batch. At every level it reads the target's keys and values up to the root."""

    def __init__(self, runner: Runner, batch: int, nodes: int) -> None:
        self.runner = runner
        self.options = runner.model.draft_model.options
        self.cache = DraftCache(runner.config, batch, self.options.window, nodes, runner.dtype, runner.device)
        self.scale = head_dim(runner.config) ** -0.5
        vocabulary = runner.model.draft_model.vocabulary
        self.head = None if vocabulary is None else ReducedHead(runner, len(vocabulary), batch)
        """The head of a draft with a vocabulary list, otherwise None."""
        self.reads_hidden = self.options.target_feature

    @property
    def ids(self) -> Tensor | None:
        """LongTensor [B, C]: the token of each column of the logits; None if columns are tokens."""
        return None if self.head is None else self.head.ids

    @property
    def columns(self) -> int:
        """Number of columns of the logits, at most V."""
        return self.runner.config.vocab_size if self.head is None else self.head.columns

    def narrow(self, rows: slice) -> GlideDraft:
        """The draft for some consecutive rows, on the same window."""
        part = copy(self)
        part.head = None if self.head is None else self.head.narrow(rows)
        part.cache = self.cache.narrow(rows)
        return part

    def with_nodes(self, nodes: int) -> GlideDraft:
        """The draft for trees of fewer nodes, on the same window."""
        part = copy(self)
        part.cache = self.cache.with_nodes(nodes)
        return part

    def start(self, prompts: Tensor, lengths: Tensor) -> None:
        """Fill the window with the last W tokens of each prompt, and the head; see `Drafter.start`."""
        # Masked slots must be finite, and earlier requests may have left NaN.
        self.cache.clear()
        self.fill(prompts, lengths)
        if self.head is not None:
            self.head.start(prompts, lengths)

    def fill(self, tokens: Tensor, lengths: Tensor) -> None:
        """Fill the window with the last W tokens of each row. tokens: LongTensor [B, S]; lengths: LongTensor [B]."""
        offsets = torch.arange(-self.cache.window, 0, device=tokens.device)
        positions = lengths[:, None] + offsets
        self.feed(tokens.gather(1, positions.clamp(min=0)), positions, positions >= 0)

    def feed(self, tokens: Tensor, positions: Tensor, valid: Tensor) -> None:
        """Store accepted tokens [B, T] at consecutive positions [B, T] in the window, where `valid`."""
        self.runner.feed_draft(tokens, positions, valid, self.cache)

    def row_states(self) -> list[Tensor]:
        states = [self.cache.keys, self.cache.values]
        return states if self.head is None else [*states, self.head.ids, self.head.bias, self.head.regions]

    def feature(self, cache: TargetCache) -> Tensor | None:
        """The target feature [B, 1, hidden] of a round; None for a draft without one."""
        return self.runner.feature(cache.newest_hidden) if self.options.target_feature else None

    def level(
        self, tokens: Tensor, level: int, first: int, visible: Tensor, cache: TargetCache, feature: Tensor | None
    ) -> Tensor:
        """The draft's logits [B, n, C] at the n nodes of one level.

        tokens: LongTensor [B, n], the nodes first ... first + n - 1; visible: bool [B, n, N], the nodes that each of
        them sees. feature: that of the round.
        """
        attention = self.runner.attention
        root = cache.lengths
        positions = (root + level)[:, None].expand_as(tokens)

        def self_attend(q: Tensor) -> Tensor:
            return attention.window(q, self.cache.keys, self.cache.values, root, level, visible, self.scale)

        # The newest target key is at position root - 1 and the query at root + level, so the lag is level + 1. Training
        # draws such lags at random (`train.positions.random_lags`).
        def cross_attend(q: Tensor, layer: int) -> Tensor:
            keys, values = cache.layer(layer)
            return attention.prefix(q, keys, values, cache.prefix_lengths, self.scale)

        cross_attends = [partial(cross_attend, layer=layer) for layer in (-1, *self.options.kv_layers)]
        hidden = self.runner.draft(tokens, positions, self.cache, first, self_attend, cross_attends, feature)
        return self.runner.logits(hidden) if self.head is None else self.head.logits(hidden)

    def next_logits(self, tokens: Tensor, step: int, cache: TargetCache, feature: Tensor | None) -> Tensor:
        """Logits [B, V] after tokens, LongTensor [B], which are node number `step` of a chain."""
        nodes = self.cache.keys.shape[2] - self.cache.window
        visible = torch.arange(nodes, device=tokens.device) <= step
        logits = self.level(tokens[:, None], step, step, visible.expand(len(tokens), 1, -1), cache, feature)[:, 0]
        return logits if self.head is None else self.head.whole(logits)
