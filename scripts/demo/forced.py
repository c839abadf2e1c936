"""Acceptance on real text: the tree is verified by what the text says next, not by what the target would say."""

from collections.abc import Sequence

import torch
from torch import Tensor

from longspec.inference.acceptance import Sampler
from longspec.inference.engine import Engine
from longspec.inference.methods import make_drafter
from longspec.inference.runner import Runner
from longspec.models.glide import GlideMixin


class TextSampler(Sampler):
    """Chooses at every node the token that the text has at the next position."""

    def __init__(self, rows: Tensor, tree_shape: Sequence[int]) -> None:
        """rows: LongTensor [B, T]; the engine's batch are their beginnings."""
        super().__init__(temperature=0.0, top_k=0, top_p=1.0)
        self.rows = rows
        self.levels = torch.tensor(
            [0, *(level for level, width in enumerate(tree_shape, 1) for _ in range(width))], device=rows.device
        )
        self.lengths = torch.zeros(len(rows), dtype=torch.long, device=rows.device)
        """Tokens of each row that the target has read."""

    def choose(self, logits: Tensor) -> Tensor:
        if logits.dim() == 2:  # after prefill: the root
            return self.rows.gather(1, self.lengths[:, None])[:, 0]
        return self.rows.gather(1, (self.lengths[:, None] + self.levels + 1).clamp(max=self.rows.shape[1] - 1))


@torch.no_grad()
def teacher_forced_acceptance(model: GlideMixin, rows: Tensor, prompt: int, tree_shape: Sequence[int]) -> float:
    """Mean acceptance length of the tree on text, with the bonus token.

    rows: LongTensor [B, T] of real text; the first `prompt` tokens are read, then rounds go through the rest, each
    as far as the draft's tree holds the text and one token further.
    """
    sampler = TextSampler(rows, tree_shape)
    runner = Runner(model)
    drafter = make_drafter("tree", runner, len(rows), sampler, tree_shape, gamma=1, tree_rule="descend")
    engine = Engine(runner, drafter, sampler, rows[:, :prompt], [prompt] * len(rows), rows.shape[1] - prompt)
    sampler.lengths = torch.full_like(sampler.lengths, prompt)
    engine.prefill()
    emitted = rounds = 0
    while (active := sampler.lengths + drafter.depth + 2 <= rows.shape[1]).any():
        counts = engine.round(active)[1]
        sampler.lengths += counts
        emitted += int(counts.sum())
        rounds += int(active.sum())
    return emitted / rounds
