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
from longspec.inference.methods import DEFAULT_SHAPE
from longspec.inference.sampling import Sampler
from longspec.kernels.shared.watch import Watch


class TextSampler(Sampler):
    """Chooses the next token of a fixed text in place of the target's argmax, and keeps the target's logits."""

    def __init__(self, rows: Tensor, read: Sequence[int], shape: Sequence[int]) -> None:
        """rows: LongTensor [B, T], padded on the right; read: number of tokens per row that the target has read."""
        super().__init__()
        self.rows, self.read = rows, torch.tensor(read, device=rows.device)
        self.levels = torch.arange(len(shape) + 1).repeat_interleave(torch.tensor([1, *shape])).to(rows.device)
        self.seen: list[Tensor] = []
        """Target logits [B, N, V] at the nodes of the last round, also of those that a copy has read."""

    def choose(self, logits: Tensor, watch: Watch | None = None) -> Tensor:
        if logits.dim() == 2:  # [B, V] after prefill
            return self.rows.gather(1, self.read[:, None])[:, 0]
        self.seen[:] = [logits]
        following = self.read[:, None] + self.levels + 1
        return self.rows.gather(1, following.clamp(max=self.rows.shape[1] - 1))


@torch.no_grad()
def forced_acceptance(
    model: Any, texts: Sequence[Tensor], prompt_lengths: Sequence[int], shape: Sequence[int] = DEFAULT_SHAPE
) -> dict[str, float]:
    """Sums over teacher-forced rounds: "rounds", "tokens" emitted, and "bound", the bound at temperature 1.

    texts: LongTensors [T], prompt and answer, on the model's device. prompt_lengths: prompt tokens of each text. shape:
    nodes per level of the tree.
    """
    rows = torch.nn.utils.rnn.pad_sequence(list(texts), batch_first=True)
    ends = torch.tensor([len(text) for text in texts], device=rows.device)
    sampler = TextSampler(rows, prompt_lengths, shape)
    runner = make_runner(model, "auto", True)
    drafter = TreeDrafter(runner, len(rows), shape, sampler, "descend")
    new_tokens = max(len(text) - length for text, length in zip(texts, prompt_lengths, strict=True))
    engine = StaticBatch(runner, drafter, sampler, rows[:, : max(prompt_lengths)], prompt_lengths, new_tokens)
    engine.prefill()

    sums = {"rounds": 0.0, "tokens": 0.0, "bound": 0.0}
    # A row takes part while its text reaches past the deepest node of the next tree.
    while (active := sampler.read + drafter.depth + 2 <= ends).any():
        counts = engine.round(active)[1]
        bounds = 1 + depth_probabilities(drafter.proposal(), sampler.seen[0]).sum(1)
        sums["rounds"] += int(active.sum())
        sums["tokens"] += int(counts.sum())
        sums["bound"] += float(bounds[active].sum())
        sampler.read += counts
    return sums


def depth_probabilities(proposal: Proposal, logits: Tensor) -> Tensor:
    """[B, depth]: entry d - 1 is the probability that d successive samples from `logits` [B, N, V] stay in the tree."""
    log_p = logits.float().log_softmax(-1)
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    step = log_p[rows, proposal.parents.clamp(min=0), proposal.tokens]
    step = torch.where(proposal.parents < 0, -torch.inf, step)  # nodes without a parent only fill up their level
    step[:, 0] = 0.0
    # A node sees its ancestors and itself, so the sum over visible nodes is the log-probability of its path.
    paths = torch.where(proposal.visible, step[:, None, :], 0.0).sum(-1).exp()
    depths = torch.arange(1, proposal.depth + 1, device=logits.device)
    return paths @ (proposal.levels[:, None] == depths).float()
