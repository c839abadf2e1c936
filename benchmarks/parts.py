"""Parts of a tree round, and the sums over ranks that share the target, each captured and timed alone."""

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.ceilings import captured_ms
from longspec.inference.drafting.glide import GlideDraft
from longspec.inference.drafting.tree import TreeDrafter
from longspec.inference.engine.rounds import Rounds
from longspec.models.parallel import model_parallel_rank_and_size, sum_over_ranks


def glide_draft(drafter: Any) -> GlideDraft | None:
    """The GLIDE draft of a tree or a chain; None for other drafters."""
    draft = getattr(drafter, "draft", getattr(drafter, "model", None))
    return draft if isinstance(draft, GlideDraft) else None


class TreeRound:
    """The parts of a tree round as separate calls. Attention and heads run on random inputs of the round's sizes."""

    def __init__(self, engine: Rounds) -> None:
        assert isinstance(engine.drafter, TreeDrafter)
        self.engine, self.runner, self.cache = engine, engine.runner, engine.cache
        assert isinstance(engine.drafter.draft, GlideDraft)
        self.drafter, self.draft = engine.drafter, engine.drafter.draft
        self.proposal = self.drafter.propose(engine.root, self.cache)
        self.batch, self.nodes = self.proposal.tokens.shape
        # The draft runs once for the root and once for each level but the last.
        self.levels = [(0, 1), *enumerate(self.drafter.shape[:-1], 1)]

        config, head_dim = self.runner.config, self.cache.keys.shape[-1]
        heads = config.num_attention_heads // model_parallel_rank_and_size()[1]
        widths = {1, self.nodes, *self.drafter.shape}
        self.queries = {width: self._random(width, heads, head_dim).transpose(1, 2) for width in widths}
        self.hidden = {width: self._random(width, config.hidden_size) for width in widths}

        self.active = torch.ones(self.batch, dtype=torch.bool, device=self.runner.device)
        self.static_hidden = engine.forward_tree(self.proposal, self.cache)
        self.static_logits = self.runner.logits(self.static_hidden)

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(self.batch, *shape, dtype=self.runner.dtype, device=self.runner.device)

    def propose(self) -> None:
        self.drafter.propose(self.engine.root, self.cache)

    def verify(self) -> None:
        self.engine.verify(self.proposal)

    def draft_attention(self) -> None:
        attention, cache, draft = self.runner.attention, self.cache, self.draft
        for level, width in self.levels:
            visible = self.drafter.tree.visible[:, :width]
            args = (draft.cache.keys, draft.cache.values, cache.lengths, level, visible, draft.scale)
            attention.window(self.queries[width], *args)
            attention.prefix(self.queries[width], *cache.layer(-1), cache.lengths, draft.scale)

    def verify_attention(self) -> None:
        attend = self.runner.attention.hybrid(self.cache.lengths, self.proposal.visible)
        for keys, values in zip(self.cache.keys, self.cache.values, strict=True):
            attend(self.queries[self.nodes], keys, values, self.draft.scale)

    def draft_lm_head(self) -> None:
        head = self.draft.head or self.runner
        for _, width in self.levels:
            head.logits(self.hidden[width])

    def verify_lm_head(self) -> None:
        self.runner.logits(self.hidden[self.nodes])

    def accept_and_compact(self) -> None:
        with (
            patch.object(self.drafter, "propose", lambda *_: self.proposal),
            patch.object(self.engine, "forward_tree", lambda *_: self.static_hidden),
            patch.object(self.runner, "logits", lambda _: self.static_logits),
        ):
            self.engine.round(self.active)


def parts_of_round(engine: Rounds, round_ms: float) -> dict[str, float]:
    """Milliseconds per part of a tree round. Each part is captured and timed alone.

    "draft rest", "verify rest" and "residual" are differences. The residual is the round minus the sum of its parts;
    it is negative if they take less time within a round than alone.
    """
    parts = TreeRound(engine)
    calls = parts.propose, parts.verify, parts.draft_attention, parts.verify_attention, parts.draft_lm_head
    propose, verify, draft_attention, verify_attention, draft_lm_head = map(captured_ms, calls)
    verify_lm_head = captured_ms(parts.verify_lm_head)
    # Last, because it alone changes the lengths of the cached rows.
    accept = captured_ms(parts.accept_and_compact)
    return {
        "draft attention": draft_attention,
        "draft rest": propose - draft_attention - draft_lm_head,
        "lm_head": draft_lm_head + verify_lm_head,
        "verify attention": verify_attention,
        "verify rest": verify - verify_attention - verify_lm_head,
        "accept + compact": accept,
        "residual": round_ms - propose - verify - accept,
    }


def sums_ms(engine: Rounds) -> float | None:
    """Milliseconds of the two sums over ranks per target layer of a verification; None without other ranks."""
    if model_parallel_rank_and_size()[1] == 1:
        return None
    config = engine.runner.config
    like = {"dtype": engine.runner.dtype, "device": engine.runner.device}
    partial = torch.zeros(len(engine.root), engine.drafter.nodes, config.hidden_size, **like)

    def sums() -> None:
        for _ in range(2 * config.num_hidden_layers):
            sum_over_ranks(partial)

    return captured_ms(sums)
