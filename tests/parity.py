"""The logits of drafts in decoding, next to those of their training forward."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from typing import Any

import torch
from pairs import Handed
from torch import Tensor

from longspec.inference.drafting.proposal import Drafter
from longspec.inference.drafting.tree import TreeDrafter
from longspec.inference.engine.static_batch import StaticBatch
from longspec.inference.runner import Runner
from longspec.inference.sampling import GREEDY
from longspec.models.glide import GlideMixin


def training_pass(
    model: GlideMixin,
    segments: Sequence[Tensor],
    lags: Tensor | None,
    pick: Callable[..., Any],
    positions: Sequence[Tensor] | None = None,
    rows: int = 1,
) -> Any:
    """The training forward over segments of tokens, packed into `rows` rows, with `Handed(pick)`."""
    tokens, device = torch.cat(list(segments)).view(rows, -1), segments[0].device
    at = torch.cat(list(positions or [torch.arange(len(segment)) for segment in segments])).view(rows, -1)
    borders = torch.tensor([0, *accumulate(map(len, segments))], dtype=torch.int32)
    objective = Handed(pick)
    return model(tokens, labels=tokens, position_ids=at.to(device), cu_seqlens=borders, lags=lags, objective=objective)


@torch.no_grad()
def training_logits(model: GlideMixin, tokens: Tensor, lag: int | None) -> Tensor:
    """The training forward's logits [T, Vd] over one segment, tokens [T], at one lag; None: of the base variant.

    They are of the draft's own head if it has one.
    """
    head = model.draft_model.head or model.lm_head
    return training_pass(model, [tokens], None if lag is None else torch.tensor([lag]), lambda x, *_: head(x)[0])


def prefilled(model: GlideMixin, prompts: list[Tensor], drafter: Drafter) -> StaticBatch:
    """The batch of some prompts after their prefill, with room for 16 tokens per row."""
    rows = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True)
    engine = StaticBatch(Runner(model), drafter, GREEDY, rows, [len(p) for p in prompts], max_new_tokens=16)
    engine.prefill()
    return engine


def compare_trees(model: GlideMixin, prompts: list[Tensor], tolerance: dict[str, Any]) -> None:
    """Each node of a proposed tree has the training forward's logits over the prompt and the node's own ancestors."""
    drafter = TreeDrafter(Runner(model), len(prompts), shape=(3, 5, 4, 1), sampler=GREEDY, tree_rule="descend")
    levels: list[Tensor] = []
    level: Callable[..., Tensor] = drafter.draft.level
    drafter.draft.level = lambda *args: levels.append(level(*args)) or levels[-1]  # type: ignore[method-assign]
    engine = prefilled(model, prompts, drafter)
    proposal = drafter.propose(engine.root, engine.cache)
    logits = torch.cat(levels, dim=1)
    for b, prompt in enumerate(prompts):
        for node in range(logits.shape[1]):
            path = proposal.tokens[b, proposal.visible[b, node]]
            expected = training_logits(model, torch.cat([prompt, path]), int(proposal.levels[node]) + 1)[-1]
            torch.testing.assert_close(logits[b, node], expected, **tolerance, msg=f"row {b}, node {node}")
