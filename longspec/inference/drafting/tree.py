"""Tree drafting: each level holds the most probable continuations of the level before it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspec.inference.cache import TargetCache
from longspec.inference.drafting.glide import GlideDraft
from longspec.inference.drafting.proposal import Proposal
from longspec.models.glide import GlideMixin


class TreeDrafter:
    """A tree of static shape: level d holds the shape[d - 1] best (parent log-probability + child's) over parents ×
    vocabulary (LongSpec, tree drafting). It is built without chance, so any temperature accepts it losslessly."""

    def __init__(self, model: GlideMixin, batch: int, shape: Sequence[int], temperature: float) -> None:
        self.shape = tuple(shape)
        self.depth = len(self.shape)
        self.nodes = 1 + sum(self.shape)
        self.temperature = temperature or 1.0
        self.draft = GlideDraft(model, batch, self.nodes)
        self.start, self.feed = self.draft.start, self.draft.feed

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        batch, device = len(root), root.device
        tokens = torch.zeros(batch, self.nodes, dtype=torch.long, device=device)
        parents = torch.full_like(tokens, -1)
        levels = torch.zeros(self.nodes, dtype=torch.long, device=device)
        visible = torch.eye(self.nodes, dtype=torch.bool, device=device).repeat(batch, 1, 1)
        tokens[:, 0] = root
        scores = torch.zeros(batch, 1, device=device)
        rows = torch.arange(batch, device=device)[:, None]
        above = slice(0, 1)
        for depth, width in enumerate(self.shape, start=1):
            logits = self.draft.level(tokens[:, above], depth - 1, above.start, visible[:, above], cache)
            scores, parent, token = best_children(scores, logits.float() / self.temperature, width)
            here = slice(above.stop, above.stop + width)
            tokens[:, here], parents[:, here], levels[here] = token, parent + above.start, depth
            visible[:, here] |= visible[rows, parents[:, here]]
            above = here
        return Proposal(tokens, parents, levels, visible, self.depth)


def best_children(scores: Tensor, logits: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `width` best continuations over all parents × vocabulary.

    scores: [B, n], log-probability of each parent's path; logits: [B, n, V]. Returns (score, parent number within
    the level, token), each [B, width], best first.
    """
    # A level's best `width` are among the best `width` of each parent, which are far fewer than parents × V.
    best, token = logits.log_softmax(-1).topk(width, dim=-1)
    best = scores[..., None] + best
    score, index = best.flatten(1).topk(width, dim=-1)
    return score, index // width, token.flatten(1).gather(1, index)
