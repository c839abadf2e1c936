"""Tree drafting: each level holds the best continuations of the level before it, likeliest or sampled."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from longspec.inference.acceptance import Sampler
from longspec.inference.cache import TargetCache
from longspec.inference.drafting.glide import GlideDraft
from longspec.inference.drafting.proposal import Proposal
from longspec.models.glide import GlideMixin


class TreeDrafter:
    """A tree of static shape: level d holds shape[d - 1] continuations of the level before, over parents × vocabulary.

    tree_rule "reject": samples of the draft without replacement, for recursive rejection; "descend": the most probable
    ones (LongSpec, tree drafting), built without chance. At temperature 0 both are the latter.
    """

    def __init__(self, model: GlideMixin, batch: int, shape: Sequence[int], sampler: Sampler, tree_rule: str) -> None:
        self.shape = tuple(shape)
        self.depth = len(self.shape)
        self.nodes = 1 + sum(self.shape)
        self.sampler = sampler
        self.sampled = tree_rule == "reject" and not sampler.greedy
        self.draft = GlideDraft(model, batch, self.nodes)
        self.start, self.feed = self.draft.start, self.draft.feed

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        batch, device = len(root), root.device
        tokens = torch.zeros(batch, self.nodes, dtype=torch.long, device=device)
        parents = torch.full_like(tokens, -1)
        levels = torch.zeros(self.nodes, dtype=torch.long, device=device)
        visible = torch.eye(self.nodes, dtype=torch.bool, device=device).repeat(batch, 1, 1)
        tokens[:, 0] = root
        scores, arrivals = torch.zeros(2, batch, 1, device=device)
        distributions = []
        rows = torch.arange(batch, device=device)[:, None]
        above = slice(0, 1)
        for depth, width in enumerate(self.shape, start=1):
            logits = self.draft.level(tokens[:, above], depth - 1, above.start, visible[:, above], cache)
            if self.sampled:
                distributions.append(self.sampler.probabilities(logits))
                scores, arrivals, parent, token = sampled_children(
                    scores, arrivals, distributions[-1], width, self.sampler
                )
            else:
                scores, parent, token = best_children(scores, logits.float() / (self.sampler.temperature or 1), width)
            here = slice(above.stop, above.stop + width)
            tokens[:, here], parents[:, here], levels[here] = token, parent + above.start, depth
            visible[:, here] |= visible[rows, parents[:, here]]
            if self.sampled:
                parents[:, here].masked_fill_(arrivals.isinf(), -1)
            above = here
        q = torch.cat(distributions, 1) if self.sampled else None
        return Proposal(tokens, parents, levels, visible, self.shape, q)


def best_children(scores: Tensor, logits: Tensor, width: int) -> tuple[Tensor, Tensor, Tensor]:
    """The `width` most probable continuations over all parents × vocabulary.

    scores: [B, n], log-probability of each parent's path; logits: [B, n, V]. Returns (score, parent number within
    the level, token), each [B, width], best first.
    """
    # A level's best `width` are among the best `width` of each parent, which are far fewer than parents × V.
    best, token = logits.log_softmax(-1).topk(width, dim=-1)
    best = scores[..., None] + best
    score, index = best.flatten(1).topk(width, dim=-1)
    return score, index // width, token.flatten(1).gather(1, index)


def sampled_children(
    scores: Tensor, arrivals: Tensor, q: Tensor, width: int, sampler: Sampler
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`width` continuations sampled without replacement over all parents × vocabulary, in the order of the draws.

    It is a race: each path arrives after an exponential time whose rate is its probability, a parent with the first of
    its children; the others follow memorylessly. (The Gumbel top-k trick on a tree, arXiv 1903.06059.) Hence a
    parent's children are, in their order, draws from its q without replacement, however many of them are kept.

    scores, arrivals: [B, n], log-probability and arrival of each parent's path; q: [B, n, V]. Returns (score, arrival,
    parent number within the level, token), each [B, width], the first two fp64; where q holds too few tokens, the rest
    arrives at inf.
    """
    vocab = q.shape[-1]
    # fp32 would lose improbable paths, and its exponential is coarse near 0 on CUDA.
    score = scores[..., None] + q.double().log()
    rates = score.exp()
    times = sampler.arrivals(rates)
    times = torch.where(rates > 0, arrivals[..., None] + (times - times.amin(-1, keepdim=True)), torch.inf)
    arrival, index = times.flatten(1).topk(width, dim=-1, largest=False)
    return score.flatten(1).gather(1, index), arrival, index // vocab, index % vocab
