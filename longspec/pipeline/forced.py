"""Two estimates of the acceptance length from given answers, without generating text.

Teacher-forced acceptance: every round drafts a tree as in decoding and accepts the nodes that agree with the answer.

The bound at temperature 1: a sample from the target follows a given node's path with probability p(node), the product
of the target's probabilities along the path. A tree built without randomness therefore has the expected acceptance
length 1 + sum of p(node) over all nodes. The logits of the verification pass give p.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longspec.inference.drafting.proposal import Proposal
from longspec.inference.drafting.tree import TreeDrafter
from longspec.inference.engine.static_batch import StaticBatch
from longspec.inference.fused_runner import make_runner
from longspec.inference.methods import DEFAULT_SHAPE, Drafting, make_drafter
from longspec.inference.sampling import Sampler
from longspec.kernels.shared.watch import Watch


class TextSampler(Sampler):
    """Chooses the next token of a fixed text in place of the target's argmax, and keeps the target's logits."""

    def __init__(self, text: Tensor, read: int, shape: Sequence[int]) -> None:
        """text: LongTensor [T]. read: number of its tokens that the target has read."""
        super().__init__()
        self.text, self.read = text, torch.tensor([read], device=text.device)  # a copy shares the tensor
        self.levels = torch.arange(len(shape) + 1).repeat_interleave(torch.tensor([1, *shape])).to(text.device)
        self.seen: list[Tensor] = []
        """Target logits [1, N, V] at the nodes of the last round, also of those that a copy has read."""

    def choose(self, logits: Tensor, watch: Watch | None = None) -> Tensor:
        if logits.dim() == 2:  # [1, V] after prefill
            return self.text[self.read]
        self.seen[:] = [logits]
        return self.text[(self.read + self.levels + 1).clamp(max=len(self.text) - 1)][None]


@torch.no_grad()
def forced_acceptance(
    model: Any,
    prompt: Sequence[int],
    answer: Sequence[int],
    shape: Sequence[int] = DEFAULT_SHAPE,
    drafter: str = "tree",
) -> dict[str, float]:
    """Sums over teacher-forced rounds: "rounds", "decoded_tokens", and "bound", the tree's bound at temperature 1.

    shape: nodes per level of the tree. drafter: "tree", or "lookup" with a chain as shape.
    """
    text = torch.tensor([*prompt, *answer], device=model.device)
    sampler = TextSampler(text, len(prompt), shape)
    runner = make_runner(model, "auto", True)
    proposer = make_drafter(Drafting(drafter, shape, len(shape), "descend"), runner, 1, sampler)
    engine = StaticBatch(runner, proposer, sampler, text[None, : len(prompt)], [len(prompt)], len(answer))
    engine.prefill()

    sums = {"rounds": 0.0, "decoded_tokens": 0.0, "bound": 0.0}
    # While the text reaches past the deepest node of the next tree.
    while int(sampler.read) + proposer.depth + 2 <= len(text):
        count = engine.round(torch.ones(1, dtype=torch.bool, device=text.device))[1]
        sums["rounds"] += 1
        sums["decoded_tokens"] += int(count)
        if isinstance(proposer, TreeDrafter):
            sums["bound"] += float(path_probabilities(proposer.proposal(), sampler.seen[0]).sum())
        sampler.read += count
    return sums


def path_probabilities(proposal: Proposal, logits: Tensor) -> Tensor:
    """The probability of each node's path, fp32 [B, N]: samples from `logits` [B, N, V] follow it. 1 for the root."""
    log_p = logits.float().log_softmax(-1)
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    step = log_p[rows, proposal.parents.clamp(min=0), proposal.tokens]
    step = torch.where(proposal.parents < 0, -torch.inf, step)  # nodes without a parent only fill up their level
    step[:, 0] = 0.0
    # A node sees its ancestors and itself, so the sum over visible nodes is the log-probability of its path.
    return torch.where(proposal.visible, step[:, None, :], 0.0).sum(-1).exp()
