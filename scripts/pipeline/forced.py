"""Acceptance on given text: the tree is verified by what the text says next, not by what the target would say."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from longspec.inference.drafting.proposal import Proposal
from longspec.inference.drafting.tree import TreeDrafter
from longspec.inference.engine import Engine
from longspec.inference.runner import Runner
from longspec.inference.sampling import Sampler
from longspec.kernels.shared.watch import Watch
from longspec.models.glide import GlideMixin


@dataclass(frozen=True)
class ForcedAcceptance:
    """Counts over all rounds."""

    rounds: int
    emitted: int
    """Tokens of the text that the rounds went through, one bonus token a round included."""
    accepted_by_depth: list[int]
    """Entry d - 1: rounds whose tree held at least the text's next d tokens."""
    probability_by_depth: list[float]
    """Entry d - 1: summed over the rounds, the probability at temperature 1 that the target's own draws stay in the
    tree for d steps: the sum over its nodes of depth d of the target's probabilities along their paths."""

    @property
    def acceptance_length(self) -> float:
        return self.emitted / self.rounds

    @property
    def expected_length(self) -> float:
        """What `--tree_rule descend` emits a round, on average over the target's draws at these rounds' roots."""
        return 1 + sum(self.probability_by_depth) / self.rounds


class TextSampler(Sampler):
    """Chooses at every node the token that the text has at the next position."""

    def __init__(self, rows: Tensor, lengths: Sequence[int], tree_shape: Sequence[int]) -> None:
        """rows: LongTensor [B, T]; the engine's batch are their beginnings, of these lengths."""
        super().__init__(temperature=0.0, top_k=0, top_p=1.0)
        self.rows = rows
        self.levels = torch.tensor(
            [0, *(level for level, width in enumerate(tree_shape, 1) for _ in range(width))], device=rows.device
        )
        self.lengths = torch.tensor(lengths, device=rows.device)
        """Tokens of each row that the target has read."""
        self.logits = torch.empty(0)
        """The target's at every node [B, N, V], of the last round."""

    def choose(self, logits: Tensor, watch: Watch | None = None) -> Tensor:
        if logits.dim() == 2:  # after prefill: the root
            return self.rows.gather(1, self.lengths[:, None])[:, 0]
        self.logits = logits
        return self.rows.gather(1, (self.lengths[:, None] + self.levels + 1).clamp(max=self.rows.shape[1] - 1))


@torch.no_grad()
def teacher_forced_acceptance(
    model: GlideMixin, rows: Tensor, prompts: Sequence[int], ends: Sequence[int], tree_shape: Sequence[int]
) -> ForcedAcceptance | None:
    """The tree's acceptance on text; None if no row is long enough for a round.

    rows: LongTensor [B, T] of text, padded right. Of each row the first tokens, as many as `prompts` says, are read,
    then rounds go through the rest up to its end, each as far as the draft's tree holds the text and one token further.
    """
    sampler = TextSampler(rows, prompts, tree_shape)
    runner = Runner(model)
    drafter = TreeDrafter(runner, len(rows), tree_shape, sampler, "descend")
    new_tokens = max(end - prompt for end, prompt in zip(ends, prompts, strict=True))
    engine = Engine(runner, drafter, sampler, rows[:, : max(prompts)], prompts, new_tokens)
    engine.prefill()
    last = torch.tensor(ends, device=rows.device)
    counted = []
    reached = torch.zeros(drafter.depth, device=rows.device)
    while (active := sampler.lengths + drafter.depth + 2 <= last).any():
        counts = engine.round(active)[1]
        sampler.lengths += counts
        counted += counts[active].tolist()
        reached += probability_by_depth(drafter.proposal(), sampler.logits)[active].sum(0)
    if not counted:
        return None
    by_depth = [sum(count > depth for count in counted) for depth in range(1, drafter.depth + 1)]
    return ForcedAcceptance(len(counted), sum(counted), by_depth, reached.tolist())


def probability_by_depth(proposal: Proposal, logits: Tensor) -> Tensor:
    """[B, depth]: entry d - 1 is the probability that draws from `logits` [B, N, V], descending from the root, stay in
    the tree for d steps. At d = 1 that is Σ p(children of the root)."""
    log_p = logits.float().log_softmax(-1)
    parents = proposal.parents.clamp(min=0)
    batch = torch.arange(len(parents), device=parents.device)[:, None]
    step = log_p[batch, parents, proposal.tokens].clamp(min=-1e4)
    step[:, 0] = 0.0
    path = (proposal.visible.float() @ step[..., None])[..., 0].exp()
    depths = torch.arange(1, proposal.depth + 1, device=path.device)
    return path @ (proposal.levels[:, None] == depths).float()
