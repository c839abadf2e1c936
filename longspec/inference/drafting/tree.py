"""Tree drafting: each level holds the best continuations of the level before it, likeliest or sampled."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import torch
from torch import Tensor

from longspec.inference.acceptance import Sampler
from longspec.inference.cache import Fault, TargetCache
from longspec.inference.drafting.glide import GlideDraft
from longspec.inference.drafting.proposal import Proposal
from longspec.inference.runner import Runner
from longspec.kernels.decoding.tree import new_tree
from longspec.kernels.decoding.vocabulary import best_children, sampled_children


class TreeDrafter:
    """A tree of static shape: level d holds shape[d - 1] continuations of the level before, over parents × vocabulary.

    tree_rule "reject": samples of the draft without replacement, for recursive rejection; "descend": the most probable
    ones (LongSpec, tree drafting), built without chance. At temperature 0 both are the latter.
    """

    def __init__(self, runner: Runner, batch: int, shape: Sequence[int], sampler: Sampler, tree_rule: str) -> None:
        self.shape = tuple(shape)
        self.depth = len(self.shape)
        self.nodes = 1 + sum(self.shape)
        self.sampler = sampler
        self.kind: Hashable = type(self), self.shape, tree_rule
        self.draft = GlideDraft(runner, batch, self.nodes)
        self.start, self.feed = self.draft.start, self.draft.feed
        self.reads_hidden = self.draft.reads_hidden
        sampled = tree_rule == "reject" and not sampler.greedy
        self.tree = new_tree(batch, self.nodes, sampled, runner.device)
        inner = self.nodes - self.shape[-1]
        self.q = torch.empty(batch, inner, runner.config.vocab_size, device=runner.device) if sampled else None
        widths = torch.tensor([1, *self.shape])
        levels = torch.arange(self.depth + 1).repeat_interleave(widths).to(runner.device)
        self.proposal = Proposal(*self.tree[:2], levels, self.tree.visible, self.shape, self.q)

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        """The same tensors in every round, written anew."""
        tree = self.tree
        tree.tokens[:, 0] = root
        noise, watch = self._noise(), cache.watch(Fault.DRAFT)
        above = slice(0, 1)
        for level, width in enumerate(self.shape):
            logits = self.draft.level(tree.tokens[:, above], level, above.start, tree.visible[:, above], cache)
            if self.q is None:
                best_children(tree, above, width, logits, self.sampler.temperature or 1.0, watch)
            else:
                warped = self.sampler.warped(logits)
                sampled_children(tree, above, width, *warped, noise[level], self.q[:, above], watch)
            above = slice(above.stop, above.stop + width)
        return self.proposal

    def _noise(self) -> list[Tensor]:
        """For each level that others are sampled below [B, n, V]: all drawn in one launch, 8 bytes a number."""
        if self.q is None:
            return []
        batch, _, vocab = self.q.shape
        widths = (1, *self.shape[:-1])
        drawn = self.sampler.exponentials(self.q).flatten().split([batch * width * vocab for width in widths])
        return [part.view(batch, width, vocab) for part, width in zip(drawn, widths, strict=True)]
