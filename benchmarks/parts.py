"""Parts of a tree round, and the sums over ranks that share the target, each captured and timed alone."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from benchmarks.ceilings import captured_ms
from longspec.inference.drafting.glide import GlideDraft
from longspec.inference.engine import Engine
from longspec.models.parallel import model_parallel_rank_and_size, sum_over_ranks


def glide_draft(drafter: Any) -> GlideDraft | None:
    """The GLIDE draft of a tree or a chain; None for other drafters."""
    draft = getattr(drafter, "draft", getattr(drafter, "model", None))
    return draft if isinstance(draft, GlideDraft) else None


def parts_of_round(engine: Engine, round_ms: float) -> dict[str, float]:
    """Milliseconds per part of a tree round. Each part is captured and timed alone.

    "draft rest", "verify rest" and "residual" are differences. The residual is the round minus the sum of its parts;
    it is negative if they take less time within a round than alone.
    """
    runner, cache, drafter = engine.runner, engine.cache, engine.drafter
    draft: GlideDraft = drafter.draft  # type: ignore[attr-defined]
    proposal = drafter.propose(engine.root, cache)
    batch, nodes = proposal.tokens.shape
    config = runner.config
    scale = draft.scale
    heads = config.num_attention_heads // model_parallel_rank_and_size()[1]

    def random(width: int, heads: int) -> Tensor:
        return torch.randn(
            batch, width, heads, cache.keys.shape[-1], dtype=runner.dtype, device=runner.device
        ).transpose(1, 2)

    # The draft runs once for the root and once for each level but the last.
    shape: tuple[int, ...] = drafter.shape  # type: ignore[attr-defined]
    levels = [(0, 1), *enumerate(shape[:-1], 1)]
    widths = {1, nodes, *shape}
    queries = {width: random(width, heads) for width in widths}
    hidden = {width: random(width, config.hidden_size // queries[1].shape[-1]) for width in widths}
    hidden = {width: x.transpose(1, 2).flatten(2) for width, x in hidden.items()}

    def draft_attention() -> None:
        for level, width in levels:
            visible = drafter.tree.visible[:, :width]  # type: ignore[attr-defined]
            args = (draft.cache.keys, draft.cache.values, cache.lengths, level, visible, scale)
            runner.attention.window(queries[width], *args)
            runner.attention.prefix(queries[width], *cache.layer(-1), cache.lengths, scale)

    def verify_attention() -> None:
        attend = runner.attention.hybrid(cache.lengths, proposal.visible)
        for keys, values in zip(cache.keys, cache.values, strict=True):
            attend(queries[nodes], keys, values, scale)

    def draft_lm_head() -> None:
        for _, width in levels:
            if draft.head is None:
                runner.logits(hidden[width])
            else:
                draft.head.logits(hidden[width])

    active = torch.ones(batch, dtype=torch.bool, device=runner.device)
    static_hidden = engine.forward_tree(proposal, cache)
    static_logits = runner.logits(static_hidden)

    def accept_and_compact() -> None:
        with (
            patch.object(drafter, "propose", lambda *_: proposal),
            patch.object(engine, "forward_tree", lambda *_: static_hidden),
            patch.object(runner, "logits", lambda _: static_logits),
        ):
            engine.round(active)

    propose = captured_ms(lambda: drafter.propose(engine.root, cache))
    verify = captured_ms(lambda: engine.verify(proposal))
    draft_attention_ms = captured_ms(draft_attention)
    verify_attention_ms = captured_ms(verify_attention)
    draft_lm_head_ms = captured_ms(draft_lm_head)
    verify_lm_head_ms = captured_ms(lambda: runner.logits(hidden[nodes]))
    # Last, because it alone changes the lengths of the cached rows.
    accept_ms = captured_ms(accept_and_compact)
    return {
        "draft attention": draft_attention_ms,
        "draft rest": propose - draft_attention_ms - draft_lm_head_ms,
        "lm_head": draft_lm_head_ms + verify_lm_head_ms,
        "verify attention": verify_attention_ms,
        "verify rest": verify - verify_attention_ms - verify_lm_head_ms,
        "accept + compact": accept_ms,
        "residual": round_ms - propose - verify - accept_ms,
    }


def sums_ms(engine: Engine) -> float | None:
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
