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


def parts_of_round(engine: Rounds, round_ms: float) -> dict[str, float]:
    """Milliseconds per part of a tree round. Each part is captured and timed alone.

    Attention and heads run on random inputs of the round's sizes. "draft rest", "verify rest" and "residual" are
    differences. The residual is the round minus the sum of its parts; it is negative if they take less time within a
    round than alone.
    """
    drafter, runner, cache = engine.drafter, engine.runner, engine.cache
    assert isinstance(drafter, TreeDrafter) and isinstance(drafter.draft, GlideDraft)
    draft = drafter.draft
    proposal = drafter.propose(engine.root, cache)
    batch, nodes = proposal.tokens.shape
    # The draft runs once for the root and once for each level but the last.
    levels = [(0, 1), *enumerate(drafter.shape[:-1], 1)]

    def random(*shape: int) -> Tensor:
        return torch.randn(batch, *shape, dtype=runner.dtype, device=runner.device)

    heads, head_dim = runner.config.num_attention_heads // model_parallel_rank_and_size()[1], cache.keys.shape[-1]
    widths = {1, nodes, *drafter.shape}
    queries = {width: random(width, heads, head_dim).transpose(1, 2) for width in widths}
    hidden = {width: random(width, runner.config.hidden_size) for width in widths}
    verified = engine.forward_tree(proposal, cache)
    logits, active = runner.logits(verified), torch.ones(batch, dtype=torch.bool, device=runner.device)

    def draft_attention() -> None:
        for level, width in levels:
            visible = drafter.tree.visible[:, :width]
            args = (draft.cache.keys, draft.cache.values, cache.lengths, level, visible, draft.scale)
            runner.attention.window(queries[width], *args)
            runner.attention.prefix(queries[width], *cache.layer(-1), cache.lengths, draft.scale)

    def verify_attention() -> None:
        attend = runner.attention.hybrid(cache.lengths, proposal.visible)
        for keys, values in zip(cache.keys, cache.values, strict=True):
            attend(queries[nodes], keys, values, draft.scale)

    def draft_lm_head() -> None:
        head = draft.head or runner
        for _, width in levels:
            head.logits(hidden[width])

    def accept_and_compact() -> None:
        with (
            patch.object(drafter, "propose", lambda *_: proposal),
            patch.object(engine, "forward_tree", lambda *_: verified),
            patch.object(runner, "logits", lambda _: logits),
        ):
            engine.round(active)

    ms = {part.__name__: captured_ms(part) for part in (draft_attention, verify_attention, draft_lm_head)}
    propose = captured_ms(lambda: drafter.propose(engine.root, cache))
    verify = captured_ms(lambda: runner.logits(engine.forward_tree(proposal, engine.cache)))
    verify_lm_head = captured_ms(lambda: runner.logits(hidden[nodes]))
    # Last, because it alone changes the lengths of the cached rows.
    accept = captured_ms(accept_and_compact)
    return {
        "draft attention": ms["draft_attention"],
        "draft rest": propose - ms["draft_attention"] - ms["draft_lm_head"],
        "lm_head": ms["draft_lm_head"] + verify_lm_head,
        "verify attention": ms["verify_attention"],
        "verify rest": verify - ms["verify_attention"] - verify_lm_head,
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
