"""Known faults of speculative sampling, some from the published code, to be planted in tests of losslessness."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import getattr_static
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longspec.inference import acceptance, filters
from longspec.inference.acceptance import Accepted
from longspec.inference.drafting import chain as chain_drafting
from longspec.inference.drafting.proposal import Proposal
from longspec.inference.engine import rounds
from longspec.inference.penalties import Nodes
from longspec.inference.row_settings import NO_TOKEN, PenaltyRows
from longspec.inference.sampling import Sampler, per_row
from longspec.kernels.backend import Backend
from longspec.kernels.shared.tree import Branches, Draws, SelectedNodes, Tree
from longspec.kernels.torch import acceptance as torch_acceptance

follow, reject, accept = acceptance.follow, acceptance.reject, acceptance.accept
grow, select, noise = Backend.grow_level, Backend.select_nodes, Backend.row_noise
choose, chain, read = Sampler.choose, chain_drafting.chain, Nodes.read
append, start = PenaltyRows.append, PenaltyRows.start
Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Fault:
    plant: Callable[[Patch], None]
    """Patches the fault into the code under test."""
    methods: tuple[str, ...]
    """Methods whose output the fault changes; "tree" and "tree, descend" are the two tree rules."""
    warp: dict[str, Any] = field(default_factory=dict)
    """Sampling options without which the fault has no effect."""


def in_place_of(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[[Patch], None]]:
    """Turns a faulty function into the `plant` that puts it in the place of `owner.name`."""

    def planted(faulty: Any) -> Callable[[Patch], None]:
        is_static = isinstance(getattr_static(owner, name), staticmethod)
        return lambda patch: patch.setattr(owner, name, staticmethod(faulty) if is_static else faulty)

    return planted


@in_place_of(acceptance, "follow")
def probabilities_by_node_number(proposal: Proposal, choice: Tensor, *backend: Any) -> Accepted:
    """The target's choice at node number d is used for every node at depth d."""
    return follow(proposal, choice[:, proposal.levels], *backend)


@in_place_of(Backend, "grow_level")
def top_k_children_as_samples(
    tree: Tree, above: slice, width: int, logits: Tensor, temperature: Tensor, draws: Draws, *_: object
) -> None:
    """The draft's most probable children are accepted with min(1, p/q), as if they had been sampled from q."""
    draws.q.copy_(Backend.softmax(logits, temperature))
    grow(tree, above, width, logits, temperature)


@in_place_of(Backend, "grow_level")
def siblings_out_of_order(tree: Tree, above: slice, width: int, *args: Any) -> None:
    """Siblings are tried in the reverse of the order in which they were sampled."""
    grow(tree, above, width, *args)
    here = slice(above.stop, above.stop + width)
    for values in (tree.tokens, tree.parents, tree.scores, tree.arrivals):
        values[:, here] = values[:, here].flip(1)
    tree.visible[:, here, : above.stop] = tree.visible[:, here, : above.stop].flip(1)


@in_place_of(acceptance, "follow")
def selection_sees_the_targets_draw(proposal: Proposal, choice: Tensor, *backend: Any) -> Accepted:
    """A node is verified only if the token that the target draws after it is not token 0."""
    return follow(replace(proposal, parents=proposal.parents.where(choice != 0, -1)), choice, *backend)


@in_place_of(Backend, "select_nodes")
def siblings_reordered_before_selection(tree: Tree, levels: Tensor, *args: Any, **kwargs: Any) -> SelectedNodes:
    """The nodes of a level are reversed after they were drawn, before some of them are selected."""
    order = torch.cat([(levels == level).nonzero()[:, 0].flip(0) for level in range(int(levels.max()) + 1)])
    parents = tree.parents[:, order]
    reordered = Tree(
        tree.tokens[:, order],
        order.argsort()[parents.clamp(min=0)].where(parents >= 0, -1),
        tree.visible[:, order][:, :, order],
        tree.scores[:, order],
        tree.arrivals[:, order],
    )
    selected = select(reordered, levels, *args, **kwargs)
    return selected._replace(wide=order[selected.wide])


@in_place_of(Backend, "select_nodes")
def samples_selected_by_probability(tree: Tree, *args: Any, **kwargs: Any) -> SelectedNodes:
    """Sampled nodes are selected by the probability of their paths instead of their arrival."""
    return select(tree._replace(arrivals=-tree.scores), *args, **kwargs)


@in_place_of(Backend, "select_nodes")
def branches_admitted_by_the_draws(
    tree: Tree, levels: Tensor, nodes: int, by_arrival: bool, branches: Branches | None = None
) -> SelectedNodes:
    """A lookup branch takes part only if its first token was sampled below the root."""
    if branches is not None:
        children = tree.tokens.where(tree.parents == 0, -1)
        drawn = (children[:, None] == branches.tokens[..., :1]).any(2, keepdim=True)
        branches = branches._replace(scores=branches.scores.where(drawn, -torch.inf))
    return select(tree, levels, nodes, by_arrival, branches)


def no_renormalization(patch: Patch) -> None:
    """After a rejection, the remaining p and q are not renormalized before the next sibling is tried."""
    patch.setattr(torch_acceptance, "_sums", lambda left, remaining: np.ones(2))


def resampling_from_p(patch: Patch) -> None:
    """After a rejection, the token is sampled from p instead of the normalized max(p - q, 0)."""
    patch.setattr(torch_acceptance, "_residual", lambda p, q, ratio: p)


@in_place_of(rounds, "accept")
def temperature_left_out(proposal: Proposal, logits: Tensor, sampler: Sampler, *_: object) -> Accepted:
    """The target's logits are not divided by the temperature."""
    return accept(proposal, logits * per_row(sampler.temperature, logits).float(), sampler)


@in_place_of(Sampler, "choose")
def greedy_first_token(self: Sampler, logits: Tensor, *watch: Any) -> Tensor:
    """The first token after prefill is the argmax."""
    return logits.argmax(-1) if logits.dim() == 2 else choose(self, logits, *watch)


@in_place_of(acceptance, "reject")
def threshold_off_by_one_depth(proposal: Proposal, q: Tensor, p: Tensor, sampler: Sampler) -> Accepted:
    """A token is compared with the target's distribution for the position after it."""
    return reject(proposal, q, torch.cat([p[:, 1:], p[:, -1:]], 1), sampler)


@in_place_of(acceptance, "reject")
def one_token_too_many(proposal: Proposal, q: Tensor, p: Tensor, sampler: Sampler) -> Accepted:
    """The first rejected token of a chain is kept."""
    accepted = reject(proposal, q, p, sampler)
    whole = torch.arange(proposal.depth + 1, device=p.device).expand(len(p), -1)
    return replace(accepted, path=whole, count=(accepted.count + 1).clamp(max=proposal.depth))


@in_place_of(chain_drafting, "chain")
def q_is_not_what_was_sampled_from(tokens: Tensor, q: Tensor) -> Proposal:
    """The recorded q differs from the distribution from which the chain was sampled, as without its temperature."""
    return chain(tokens, q.sqrt() / q.sqrt().sum(-1, keepdim=True))


@in_place_of(Sampler, "warped")
def warpers_in_another_order(self: Sampler, logits: Tensor) -> tuple[Tensor, Tensor | None]:
    """top-p is applied before the temperature."""
    top_p = per_row(self.settings["top_p"], logits)
    return filters.keep_likely(logits.float(), {"top_p": top_p}, 0), self.temperature


def one_stream_of_draws(patch: Patch) -> None:
    """Draft and target draw the same numbers."""
    patch.setattr(Sampler, "_stream", lambda self, kind, step: kind)
    patch.setattr(Sampler, "after_prefill", lambda self: self)


def _with_noise(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Callable[[Patch], None]:
    """A fault in the seeds and positions that random numbers depend on."""
    faulty = staticmethod(lambda seeds, positions, *rest: noise(*change(seeds, positions), *rest))
    return lambda patch: patch.setattr(Backend, "row_noise", faulty)


@in_place_of(Nodes, "read")
def nodes_without_ancestors(proposal: Proposal) -> Nodes:
    nodes = read(proposal)
    return Nodes(torch.zeros_like(nodes.levels), torch.full_like(nodes.paths, NO_TOKEN))


@in_place_of(Nodes, "read")
def nodes_as_their_parents(proposal: Proposal) -> Nodes:
    """Each node has the penalties of its parent: it does not see itself."""
    nodes, parents = read(proposal), proposal.parents.clamp(min=0)
    paths = nodes.paths.gather(1, parents[..., None].expand_as(nodes.paths))
    return Nodes(nodes.levels.gather(1, parents), paths)


@in_place_of(Nodes, "read")
def nodes_as_their_siblings(proposal: Proposal) -> Nodes:
    """Each node has the penalties of the node before it."""
    nodes = read(proposal)
    return Nodes(nodes.levels.roll(1, 1), nodes.paths.roll(1, 1))


@in_place_of(PenaltyRows, "append")
def rows_forget_their_rounds(rows: PenaltyRows, tokens: Tensor, positions: Tensor, counts: Tensor) -> None:
    """The text of a row does not grow by what its rounds accept."""
    if tokens.shape[1] == 1:
        append(rows, tokens, positions, counts)


@in_place_of(PenaltyRows, "start")
def answers_count_their_prompts(rows: PenaltyRows, prompts: Tensor, lengths: list[int]) -> None:
    """Presence and frequency penalties count the prompt."""
    start(rows, prompts, lengths)
    rows.prompt_lengths.zero_()


BY_REJECTION = ("seq", "tree", "magicdec")
IN_SELECTION = {
    "selection sees the target's draw": Fault(selection_sees_the_targets_draw, ("tree, descend, budget",)),
    "siblings reordered before selection": Fault(siblings_reordered_before_selection, ("tree, budget",)),
    "samples selected by probability": Fault(samples_selected_by_probability, ("tree, budget",)),
    "branches admitted by the draws": Fault(branches_admitted_by_the_draws, ("tree, lookup",)),
}
"""Faults of the selection of nodes, detected by enumeration and in the distribution of generated text."""
IN_THE_RULE = IN_SELECTION | {
    "probabilities by node number": Fault(probabilities_by_node_number, ("tree, descend",)),
    "no renormalization": Fault(no_renormalization, ("tree",)),
    "resampling from p": Fault(resampling_from_p, BY_REJECTION),
    "threshold off by one depth": Fault(threshold_off_by_one_depth, BY_REJECTION),
    "one token too many": Fault(one_token_too_many, ("seq", "magicdec")),
    "q is not what was sampled from": Fault(q_is_not_what_was_sampled_from, ("seq", "magicdec")),
}
"""Faults detected by enumeration of the acceptance rule, and in the distribution of generated text."""
IN_THE_OUTPUT = IN_THE_RULE | {
    "top-k children as samples of q": Fault(top_k_children_as_samples, ("tree",)),
    "siblings out of order": Fault(siblings_out_of_order, ("tree",)),
    "temperature left out": Fault(temperature_left_out, ("seq", "tree, descend", "tree", "magicdec")),
    "greedy first token": Fault(greedy_first_token, ("seq", "tree, descend", "tree", "magicdec")),
    "warpers in another order": Fault(warpers_in_another_order, ("tree, descend",), {"top_p": 0.8}),
    "one stream of draws": Fault(one_stream_of_draws, ("seq",)),
}
"""Faults detected in the distribution of generated text."""
_TREES, _COUNTED = ("seq", "tree, descend", "tree"), {"frequency_penalty": 1.5}
PENALTY_FAULTS = {
    "nodes do not see their ancestors": Fault(nodes_without_ancestors, _TREES, _COUNTED),
    "nodes have the penalties of their parents": Fault(nodes_as_their_parents, _TREES, _COUNTED),
    "nodes have the penalties of their siblings": Fault(nodes_as_their_siblings, _TREES, _COUNTED),
    "rows forget their rounds": Fault(rows_forget_their_rounds, ("seq", "tree"), _COUNTED),
    "answers count their prompts": Fault(answers_count_their_prompts, ("tree", "lookup"), _COUNTED),
}
"""Faults of penalties, detected node by node and in the distribution of generated text."""
IN_CORRELATIONS = {
    "rows share their draws": Fault(_with_noise(lambda seeds, positions: (torch.zeros_like(seeds), positions)), _TREES),
    "rounds repeat their draws": Fault(
        _with_noise(lambda seeds, positions: (seeds, torch.zeros_like(positions))), _TREES
    ),
}
"""Faults detected by correlations between rows or rounds."""
