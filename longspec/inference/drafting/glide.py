"""The GLIDE draft during decoding: its window of accepted tokens, and the forward pass of one level of a tree."""

from copy import copy
from functools import partial

import torch
from torch import Tensor

from longspec.inference.cache import DraftCache, TargetCache
from longspec.inference.drafting.decoder import DraftDecoder, Level
from longspec.inference.drafting.reduced_head import ReducedHead
from longspec.inference.runner import Runner
from longspec.models.draft_layer import head_dim


class GlideDraft(DraftDecoder):
    """The draft for one batch. At every level it reads the target's keys and values up to the root."""

    def __init__(self, runner: Runner, batch: int, nodes: int) -> None:
        super().__init__(runner, batch, nodes)
        self.options = runner.model.draft_model.options
        self.cache = DraftCache(runner.config, batch, self.options.window, nodes, runner.dtype, runner.device)
        self.scale = head_dim(runner.config) ** -0.5
        vocabulary = runner.model.draft_model.vocabulary
        self.head = None if vocabulary is None else ReducedHead(runner, len(vocabulary), batch)
        self.reads_hidden = self.options.target_feature

    @property
    def ids(self) -> Tensor | None:  # type: ignore[override]
        return None if self.head is None else self.head.ids

    @property
    def most_columns(self) -> int:
        return self.columns if self.head is None else self.head.most_columns

    def narrow(self, rows: slice) -> "GlideDraft":
        part = copy(self)
        part.head = None if self.head is None else self.head.narrow(rows)
        part.cache = self.cache.narrow(rows)
        return part

    def with_nodes(self, nodes: int) -> "GlideDraft":
        part = super().with_nodes(nodes)
        part.cache = self.cache.with_nodes(nodes)
        return part

    def start(self, prompts: Tensor, lengths: Tensor) -> None:
        # Masked slots must be finite, and earlier requests may have left NaN.
        self.cache.keys.zero_()
        self.cache.values.zero_()
        self.refill(prompts, lengths)
        if self.head is not None:
            self.head.start(prompts, lengths)

    def refill(self, tokens: Tensor, lengths: Tensor) -> None:
        """Fill the window with the last W tokens of each row."""
        offsets = torch.arange(-self.cache.window, 0, device=tokens.device)
        positions = lengths[:, None] + offsets
        self.feed(tokens.gather(1, positions.clamp(min=0)), positions, positions >= 0)

    def feed(self, tokens: Tensor, positions: Tensor, valid: Tensor, states: Tensor | None = None) -> None:
        self.runner.feed_draft(tokens, positions, valid, self.cache)

    def row_states(self) -> list[Tensor]:
        states = [self.cache.keys, self.cache.values]
        return states if self.head is None else [*states, self.head.ids, self.head.bias, self.head.regions]

    def feature(self, cache: TargetCache) -> Tensor | None:
        """The target feature [B, 1, hidden] of a round; None for a draft without one."""
        return self.runner.feature(cache.newest_hidden) if self.options.target_feature else None

    def level(self, level: Level, cache: TargetCache, feature: Tensor | None) -> Tensor:
        attention = self.runner.attention
        root = cache.lengths
        positions = root[:, None].expand_as(level.tokens) + level.depth  # contiguous, as the kernels read it

        def self_attend(q: Tensor) -> Tensor:
            return attention.window(q, self.cache.keys, self.cache.values, root, level.depth, level.visible, self.scale)

        # The newest target key is at position root - 1 and the query at root + depth, so the lag is depth + 1. Training
        # draws such lags at random (`train.positions.random_lags`).
        def cross_attend(q: Tensor, layer: int) -> Tensor:
            keys, values = cache.layer(layer)
            return attention.prefix(q, keys, values, cache.prefix_lengths, self.scale)

        cross_attends = [partial(cross_attend, layer=layer) for layer in (-1, *self.options.kv_layers)]
        given = level.tokens, positions, self.cache, level.first, self_attend, cross_attends, feature
        hidden = self.runner.draft(*given)
        return self.runner.logits(hidden) if self.head is None else self.head.logits(hidden)
