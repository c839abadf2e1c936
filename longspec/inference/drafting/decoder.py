"""The interface of a draft in decoding."""

from copy import copy
from typing import NamedTuple, Self

import torch
from torch import Tensor

from longspec.inference.cache import TargetCache
from longspec.inference.drafting.row_state import RowState
from longspec.inference.runner import Runner
from longspec.models.draft import Draft


class Level(NamedTuple):
    """The n nodes of one level of a tree, numbered first ... first + n - 1."""

    tokens: Tensor
    """LongTensor [B, n]."""
    all_parents: Tensor | None
    """LongTensor [B, N]: the parent of each node, -1 for the root and unused nodes; None for a chain."""
    depth: int
    """0 for the root."""
    first: int
    visible: Tensor
    """bool [B, n, N]: the nodes that each of them sees, itself included."""

    @property
    def parents(self) -> Tensor:
        """LongTensor [B, n]: the number of each node's parent, or -1."""
        if self.all_parents is None:
            return torch.full_like(self.tokens, self.first - 1)
        return self.all_parents[:, self.first : self.first + self.tokens.shape[1]]


class DraftDecoder(RowState):
    """The decoding state of a draft for B rows. A subclass implements at least `level`."""

    ids: Tensor | None = None
    """LongTensor [B, C]: the token of each column of the logits; None if columns are tokens."""

    def __init__(self, runner: Runner, batch: int, nodes: int) -> None:
        """nodes: largest number of nodes of a tree, the root included."""
        self.runner, self.nodes = runner, nodes

    @property
    def draft(self) -> Draft:
        """The draft's module. Its weights may be replaced between two calls of `generate`."""
        return self.runner.model.draft_model

    def embed(self, tokens: Tensor) -> Tensor:
        """The target's embeddings [B, T, hidden] of tokens [B, T]."""
        return self.runner.model.model.embed_tokens(tokens)

    @property
    def columns(self) -> int:
        """Number of columns C of the logits, at most V."""
        return self.runner.config.vocab_size if self.ids is None else self.ids.shape[1]

    @property
    def most_columns(self) -> int:
        """Number of columns in a batch of one row. In larger ones, C may be smaller, and the last ones are missing."""
        return self.columns

    def state_bytes(self, longest: int) -> tuple[int, int]:
        """Bytes per row, and per row and position, that `reserve` allocates. longest: most tokens of a text."""
        return 0, 0

    def narrow(self, rows: slice) -> Self:
        """The decoder for some consecutive rows, on the same state."""
        return copy(self)

    def with_nodes(self, nodes: int) -> Self:
        """The decoder for trees of fewer nodes, on the same state."""
        part = copy(self)
        part.nodes = nodes
        return part

    def feed_prompt(self, tokens: Tensor, positions: Tensor, valid: Tensor, states: Tensor) -> None:
        self.feed(tokens, positions, valid, states)

    def refill(self, tokens: Tensor, lengths: Tensor) -> None:
        """Take the newest tokens of each row, which rounds without the draft did not feed, from `tokens`, LongTensor
        [B, S], up to the roots' positions, LongTensor [B]. Never called for a decoder with `layer_inputs`."""

    def feature(self, cache: TargetCache) -> Tensor | None:
        """What all levels of a round read of the target, if anything; passed to `level`."""
        return None

    def level(self, level: Level, cache: TargetCache, feature: Tensor | None) -> Tensor:
        """Logits [B, n, C] at the nodes of a level, from which the next level is grown. The root is at position
        cache.lengths, int32 [B], and the target has read the tokens before it."""
        raise NotImplementedError

    def next_logits(self, tokens: Tensor, step: int, cache: TargetCache, feature: Tensor | None) -> Tensor:
        """Logits [B, V] after tokens, LongTensor [B], which are node number `step` of a chain."""
        visible = (torch.arange(self.nodes, device=tokens.device) <= step).expand(len(tokens), 1, -1)
        return self.whole(self.level(Level(tokens[:, None], None, step, step, visible), cache, feature)[:, 0])

    def whole(self, logits: Tensor) -> Tensor:
        """Logits [B, C] over columns -> logits [B, V] over all tokens, -inf for those without a column."""
        if self.ids is None:
            return logits
        whole = logits.new_full((len(logits), self.runner.config.vocab_size), -torch.inf)
        # The maximum, because columns without a token have the id of some other one, and the logit -inf.
        return whole.scatter_reduce_(1, self.ids, logits, "amax")
