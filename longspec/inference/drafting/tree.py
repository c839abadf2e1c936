"""Tree drafting: each level holds the best continuations of the level above, either the likeliest or sampled ones. Of
the tree and of lookup branches next to it, all nodes or the best ones are verified."""

import math
from collections.abc import Hashable, Sequence
from copy import copy

import torch
from torch import Tensor

from longspec.errors import UserError
from longspec.inference.cache import Fault, TargetCache
from longspec.inference.drafting.decoder import DraftDecoder, Level
from longspec.inference.drafting.decoders import new_decoder
from longspec.inference.drafting.lookup import LookupBranches
from longspec.inference.drafting.proposal import Drafter, Proposal
from longspec.inference.drafting.row_state import RowState
from longspec.inference.runner import Runner
from longspec.inference.sampling import Sampler
from longspec.kernels.shared.tree import Branches, Draws, Tree, new_tree

LEAST_PROBABILITY = 0.1
"""Estimated probability from which on a node of a lookup branch is verified next to a sampled tree."""
LARGEST_SHARE = 0.5
"""Largest share of the verified nodes that lookup branches may have next to a sampled tree."""


class TreeDrafter(Drafter):
    """A tree of static shape. Level d holds shape[d - 1] continuations, chosen over all pairs of a node of the level
    above and a token. tree_rule "reject" samples them from the draft without replacement, for recursive rejection;
    "descend", and both rules at temperature 0, take the most probable ones. Lookup branches may join the tree; the most
    probable nodes of both are verified. Next to a sampled tree, branches are cut where they are improbable, whatever
    was sampled, and the other nodes are the first ones in the order of sampling (see `acceptance.reject`)."""

    def __init__(
        self,
        runner: Runner,
        batch: int,
        shape: Sequence[int],
        sampler: Sampler,
        tree_rule: str,
        draft: DraftDecoder | None = None,
        nodes: int | None = None,
        lookup: LookupBranches | None = None,
    ) -> None:
        """draft: with room for the whole tree; None makes a new one. nodes: nodes to be verified, the root included;
        None for all of tree and branches. Drafters may share a draft and a lookup; each token is then fed to one of
        them."""
        self.runner, self.tree_rule = runner, tree_rule
        self.shape = tuple(shape)
        self.lookup = lookup
        grown_nodes = 1 + sum(self.shape)
        most_nodes = grown_nodes + (lookup.nodes if lookup else 0)
        self.sampler = sampler.on(runner.backend)
        self.draft = draft or new_decoder(runner, batch, grown_nodes)
        if self.draft.ids is not None and max(self.shape) > self.draft.columns:
            most = f"with this draft's vocabulary a level has at most {self.draft.columns} nodes"
            raise UserError(f"tree_shape: {list(self.shape)}; {most}")
        self.reads_hidden, self.layer_inputs = self.draft.reads_hidden, self.draft.layer_inputs

        # Every round grows the tree in the same tensors.
        is_sampled = tree_rule == "reject" and not sampler.greedy
        self.tree = new_tree(batch, grown_nodes, is_sampled, runner.device)
        self.q: Tensor | None = None
        """fp32 [B, inner nodes, V]: the distributions that children are sampled from; None if they are not sampled."""
        if is_sampled:
            inner_nodes = grown_nodes - self.shape[-1]
            self.q = torch.empty(batch, inner_nodes, runner.config.vocab_size, device=runner.device)
        widths = torch.tensor([1, *self.shape])
        self.levels = torch.arange(len(widths)).repeat_interleave(widths).to(runner.device)
        """LongTensor [M]: the depth of the nodes of the whole tree."""
        self._verify(min(nodes or most_nodes, most_nodes))
        self.kind: Hashable = (type(self), self.shape, tree_rule, self.nodes, lookup and lookup.depth)

    def _verify(self, nodes: int) -> None:
        """Set the number of nodes that are verified."""
        lookup, self.nodes = self.lookup, nodes
        self.depth = min(max(len(self.shape), lookup.depth if lookup else 0), nodes - 1)
        self.least_scores = least_scores(nodes, lookup) if lookup is not None and self.q is not None else None
        """fp32 [K, D]: score that each node of the branches needs next to a sampled tree."""

    def share(self, rows: slice, sampler: Sampler) -> "TreeDrafter":
        draft = self.draft.narrow(rows)
        lookup = self.lookup and self.lookup.narrow(rows)
        # A greedy tree and a sampled one have different tensors, so such a part grows its own.
        if sampler.greedy != self.sampler.greedy:
            batch = len(self.tree.tokens[rows])
            return TreeDrafter(self.runner, batch, self.shape, sampler, self.tree_rule, draft, self.nodes, lookup)

        part = copy(self)
        part.sampler, part.draft, part.lookup = sampler.on(self.runner.backend), draft, lookup
        part.tree = Tree(*(values[rows] for values in self.tree))
        part.q = None if self.q is None else self.q[rows]
        return part

    def cut(self, nodes: int, levels: int) -> "TreeDrafter":
        """One on the same draft and lookup that grows the first `levels` levels and verifies `nodes` nodes."""
        part = copy(self)
        part.kind = (self.kind, nodes, levels)
        if levels < len(self.shape):
            part.shape = self.shape[:levels]
            grown_nodes = 1 + sum(part.shape)
            part.draft = self.draft.with_nodes(grown_nodes)
            part.tree = new_tree(len(self.tree.tokens), grown_nodes, self.q is not None, self.runner.device)
            part.levels = self.levels[:grown_nodes]
            part.q = None if self.q is None else self.q[:, : grown_nodes - part.shape[-1]]
        part._verify(nodes)
        return part

    @property
    def parts(self) -> list[RowState]:  # type: ignore[override]
        return [self.draft] if self.lookup is None else [self.draft, self.lookup.history, self.lookup]

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        """Grow a tree from the root, and select the nodes to be verified."""
        tree = self.tree
        tree.tokens[:, 0] = root
        noise = []
        if self.q is not None:  # exponential noise, fp64 [B, n, C], for each level whose nodes have sampled children
            like = self.q[..., : self.draft.columns]
            noise = self.sampler.exponentials_by_part(like, (1, *self.shape[:-1]), self.draft.most_columns)
        watch, feature = cache.watch(Fault.DRAFT), self.draft.feature(cache)
        grow_level = self.runner.backend.grow_level
        terms = self.sampler.draft_terms(self.runner.config.vocab_size, self.draft.ids)
        above = slice(0, 1)  # node numbers of the level above
        for level, width in enumerate(self.shape):
            nodes = Level(tree.tokens[:, above], tree.parents, level, above.start, tree.visible[:, above])
            logits = self.draft.level(nodes, cache, feature)
            logits = logits if terms is None else terms.applied(logits)
            if self.q is None:
                # At temperature 0 the paths are ranked by the draft's own probabilities.
                grow_level(tree, above, width, logits, self.sampler.temperature, watch=watch, ids=self.draft.ids)
            else:
                warped, temperature = self.sampler.warped(logits)
                draws = Draws(noise[level], self.q[:, above])
                grow_level(tree, above, width, warped, temperature, draws, watch, self.draft.ids)
            above = slice(above.stop, above.stop + width)
        return self.proposal(self._branches(root, cache))

    def _branches(self, root: Tensor, cache: TargetCache) -> Branches | None:
        """The lookup branches. Next to a sampled tree, only their past decides which nodes take part."""
        if self.lookup is None:
            return None
        branches = self.lookup.propose(root, cache.lengths)
        if self.least_scores is None:
            return branches
        takes_part = branches.scores >= self.least_scores
        return branches._replace(scores=branches.scores.where(takes_part, -torch.inf))

    def proposal(self, branches: Branches | None = None) -> Proposal:
        """The nodes of the grown tree and of `branches` that are to be verified."""
        tree = self.tree
        if self.lookup is None and self.nodes == len(self.levels):
            return Proposal(tree.tokens, tree.parents, self.levels, tree.visible, self.depth, self.q)
        selected = self.runner.backend.select_nodes(tree, self.levels, self.nodes, self.q is not None, branches)
        return Proposal(
            selected.tokens,
            selected.parents,
            selected.levels,
            selected.visible,
            self.depth,
            self.q,
            q_rows=selected.wide,
            from_lookup=None if branches is None else selected.in_branch,
            ranks=selected.ranks,
        )


def least_scores(nodes: int, lookup: LookupBranches) -> Tensor:
    """The log-probability [K, D] that each node of the branches needs to be verified next to a sampled tree, infinite
    beyond the share of the branches. nodes: number of verified nodes in all."""
    steps = torch.arange(lookup.depth, device=lookup.sizes.device)
    room = int(LARGEST_SHARE * (nodes - 1))
    share = lookup.sizes * min(1.0, room / lookup.nodes)
    never = steps >= share.floor()[:, None]
    return torch.full(never.shape, math.log(LEAST_PROBABILITY), device=steps.device).masked_fill(never, torch.inf)
