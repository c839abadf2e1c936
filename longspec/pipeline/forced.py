"""Two estimates of the acceptance length from given answers, without generating text.

Teacher-forced acceptance: every round drafts a tree as in decoding and accepts the nodes that agree with the answer.

The bound at temperature 1: a sample from the target follows a given node's path with probability p(node), the product
of the target's probabilities along the path. A tree built without randomness therefore has the expected acceptance
length 1 + sum of p(node) over all nodes. The logits of the verification pass give p.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from longspec.inference.device import free_bytes
from longspec.inference.drafting.proposal import Proposal
from longspec.inference.drafting.tree import TreeDrafter
from longspec.inference.engine.static_batch import StaticBatch
from longspec.inference.fused_runner import make_runner
from longspec.inference.memory import row_bytes
from longspec.inference.methods import DEFAULT_SHAPE, Drafting, make_drafter
from longspec.inference.sampling import Sampler
from longspec.kernels.shared.watch import Watch


class TextSampler(Sampler):
    """Chooses the next tokens of fixed texts in place of the target's argmax, and keeps the target's logits."""

    def __init__(self, texts: Tensor, read: Tensor, shape: Sequence[int]) -> None:
        """texts: LongTensor [B, T], padded on the right. read: LongTensor [B], tokens that the target has read."""
        super().__init__()
        self.texts, self.read = texts, read  # a copy shares the tensors
        self.levels = torch.arange(len(shape) + 1).repeat_interleave(torch.tensor([1, *shape])).to(texts.device)
        self.seen: list[Tensor] = []
        """Target logits [B, N, V] at the nodes of the last round, also of those that a copy has read."""

    def choose(self, logits: Tensor, watch: Watch | None = None) -> Tensor:
        if logits.dim() == 2:  # [B, V] after prefill
            return self.texts.gather(1, self.read[:, None])[:, 0]
        self.seen[:] = [logits]
        following = self.read[:, None] + self.levels + 1
        return self.texts.gather(1, following.clamp(max=self.texts.shape[1] - 1))


def forced_acceptance(
    model: Any,
    prompts: Sequence[Sequence[int]],
    answers: Sequence[Sequence[int]],
    shape: Sequence[int] = DEFAULT_SHAPE,
    drafter: str = "tree",
) -> Iterator[dict[str, float]]:
    """For each prompt and its answer, sums over teacher-forced rounds: "rounds", "decoded_tokens", and "bound", the
    tree's bound at temperature 1. Batches have as many rows as fit.

    shape: nodes per level of the tree. drafter: "tree", or "lookup" with a chain as shape.
    """
    longest = max(map(len, prompts)) + max(map(len, answers))
    row = row_bytes(model.config, model.lm_head.weight.dtype, longest, 1 + sum(shape))
    size = max(1, free_bytes(model.device) // 2 // row)  # the other half is for the passes
    for part in (slice(start, start + size) for start in range(0, len(prompts), size)):
        yield from _batch(model, prompts[part], answers[part], Drafting(drafter, shape, len(shape), "descend"))


@torch.no_grad()
def _batch(
    model: Any, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], drafting: Drafting
) -> list[dict[str, float]]:
    """`forced_acceptance` of one batch."""
    starts = [torch.tensor(prompt, device=model.device) for prompt in prompts]
    texts = [torch.cat([start, start.new_tensor(answer)]) for start, answer in zip(starts, answers, strict=True)]
    lengths = torch.tensor([len(text) for text in texts], device=model.device)
    read = torch.tensor([len(start) for start in starts], device=model.device)
    sampler = TextSampler(pad_sequence(texts, batch_first=True), read, drafting.tree_shape)
    runner = make_runner(model, "auto", True)
    proposer = make_drafter(drafting, runner, len(texts), sampler)
    # Their padding shows lookup nothing of the answers.
    padded = pad_sequence(starts, batch_first=True)
    engine = StaticBatch(runner, proposer, sampler, padded, read.tolist(), max(map(len, answers)))
    engine.prefill()

    rounds, decoded, bounds = sums = torch.zeros(3, len(texts), dtype=torch.float64, device=model.device)
    # While a text reaches past the deepest node of its next tree.
    while (active := read + proposer.depth + 2 <= lengths).any():
        count = engine.round(active).counts
        rounds += active
        decoded += count
        if isinstance(proposer, TreeDrafter):
            bounds += path_probabilities(proposer.proposal(), sampler.seen[0]).sum(-1).where(active, 0)
        read += count
    return [dict(zip(("rounds", "decoded_tokens", "bound"), row, strict=True)) for row in sums.T.tolist()]


def path_probabilities(proposal: Proposal, logits: Tensor) -> Tensor:
    """The probability of each node's path, fp32 [B, N]: samples from `logits` [B, N, V] follow it. 1 for the root."""
    log_p = logits.float().log_softmax(-1)
    rows = torch.arange(len(logits), device=logits.device)[:, None]
    step = log_p[rows, proposal.parents.clamp(min=0), proposal.tokens]
    step = torch.where(proposal.parents < 0, -torch.inf, step)  # nodes without a parent only fill up their level
    step[:, 0] = 0.0
    # A node sees its ancestors and itself, so the sum over visible nodes is the log-probability of its path.
    return torch.where(proposal.visible, step[:, None, :], 0.0).sum(-1).exp()
