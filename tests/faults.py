"""Faults that a sampler of speculative decoding is known for (the published code's among them), to be planted."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from longspec.inference import acceptance, engine
from longspec.inference.acceptance import Accepted
from longspec.inference.drafting import chain as chain_drafting
from longspec.inference.drafting import tree as tree_drafting
from longspec.inference.drafting.proposal import Proposal
from longspec.inference.sampling import Sampler
from longspec.kernels import vocabulary
from longspec.kernels.vocabulary import Tree

follow, reject, accept = acceptance.follow, acceptance.reject, acceptance.accept
Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Fault:
    plant: Callable[[Patch], None]
    methods: tuple[str, ...]
    """The methods that it spoils; "tree" and "tree, descend" are the two tree rules."""
    warp: dict[str, Any] = field(default_factory=dict)
    """Settings that it takes to show."""


def probabilities_by_node_number(patch: Patch) -> None:
    """The target's choice at node number d is taken for that at depth d."""

    def faulty(proposal: Proposal, choice: Tensor) -> Accepted:
        return follow(proposal, choice[:, proposal.levels])

    patch.setattr(acceptance, "follow", faulty)


def top_k_children_as_samples(patch: Patch) -> None:
    """The most probable children are judged by p/q, as if the draft had drawn them."""

    def faulty(
        tree: Tree, above: slice, width: int, logits: Tensor, temperature: float, noise: Tensor, q: Tensor, *_: object
    ) -> None:
        q.copy_(vocabulary.probabilities(logits, temperature))
        vocabulary.best_children(tree, above, width, logits, temperature)

    patch.setattr(tree_drafting, "sampled_children", faulty)


def siblings_out_of_order(patch: Patch) -> None:
    """Sampled siblings are tried in the reverse of the order in which they were drawn."""
    sampled = tree_drafting.sampled_children

    def faulty(tree: Tree, above: slice, width: int, *args: Any) -> None:
        sampled(tree, above, width, *args)
        here = slice(above.stop, above.stop + width)
        for values in (tree.tokens, tree.parents, tree.scores, tree.arrivals):
            values[:, here] = values[:, here].flip(1)
        tree.visible[:, here, : above.stop] = tree.visible[:, here, : above.stop].flip(1)

    patch.setattr(tree_drafting, "sampled_children", faulty)


def nothing_renormalised(patch: Patch) -> None:
    """After a rejection the next sibling is judged by what is left of p and q as it stands."""
    patch.setattr(acceptance, "_sums", lambda left, remaining: torch.ones(2, len(left), dtype=torch.float64))


def resampling_from_p(patch: Patch) -> None:
    """After a rejection the token is drawn from p and not from (p - q)₊."""
    patch.setattr(acceptance, "_residual", lambda p, q, ratio: p.double())


def temperature_left_out(patch: Patch) -> None:
    """The target is read at temperature 1, whatever the temperature."""

    def faulty(proposal: Proposal, logits: Tensor, sampler: Sampler, *_: object) -> Accepted:
        return accept(proposal, logits * sampler.temperature, sampler)

    patch.setattr(engine, "accept", faulty)


def greedy_first_token(patch: Patch) -> None:
    choose = Sampler.choose

    def faulty(self: Sampler, logits: Tensor, *watch: Any) -> Tensor:
        return logits.argmax(-1) if logits.dim() == 2 else choose(self, logits, *watch)

    patch.setattr(Sampler, "choose", faulty)


def threshold_off_by_one_depth(patch: Patch) -> None:
    """A token is judged by the target's distribution after it and not by the one before it."""

    def faulty(proposal: Proposal, q: Tensor, p: Tensor, sampler: Sampler) -> Accepted:
        return reject(proposal, q, torch.cat([p[:, 1:], p[:, -1:]], 1), sampler)

    patch.setattr(acceptance, "reject", faulty)


def one_token_too_many(patch: Patch) -> None:
    """The first rejected token of a chain is kept."""

    def faulty(proposal: Proposal, q: Tensor, p: Tensor, sampler: Sampler) -> Accepted:
        accepted = reject(proposal, q, p, sampler)
        whole = torch.arange(proposal.depth + 1, device=p.device).expand(len(p), -1)
        return replace(accepted, path=whole, count=(accepted.count + 1).clamp(max=proposal.depth))

    patch.setattr(acceptance, "reject", faulty)


def q_is_not_what_was_sampled_from(patch: Patch) -> None:
    """The chain is drawn under the temperature, and q is remembered without it."""
    chain = chain_drafting.chain

    def faulty(tokens: Tensor, q: Tensor) -> Proposal:
        return chain(tokens, q.sqrt() / q.sqrt().sum(-1, keepdim=True))

    patch.setattr(chain_drafting, "chain", faulty)


def warpers_in_another_order(patch: Patch) -> None:
    """top-p before the temperature."""
    init = Sampler.__init__

    def faulty(self: Sampler, *args: object, **kwargs: object) -> None:
        init(self, *args, **kwargs)  # type: ignore[arg-type]
        self.warpers.reverse()

    patch.setattr(Sampler, "__init__", faulty)


def rows_share_their_draws(patch: Patch) -> None:
    """One uniform number decides for all rows of the batch."""

    def draw(self: Sampler, probabilities: Tensor) -> Tensor:
        uniform = torch.rand(probabilities.shape[1:-1], generator=self.generator, device=probabilities.device)
        return (probabilities.cumsum(-1) < uniform[..., None]).sum(-1).clamp(max=probabilities.shape[-1] - 1)

    patch.setattr(Sampler, "draw", draw)


def rounds_repeat_their_draws(patch: Patch) -> None:
    """The generator is seeded anew in every round."""

    def faulty(proposal: Proposal, logits: Tensor, sampler: Sampler, *_: object) -> Accepted:
        if sampler.generator is not None:
            sampler.generator.manual_seed(1)
        return accept(proposal, logits, sampler)

    patch.setattr(engine, "accept", faulty)


BY_REJECTION = ("seq", "tree", "magicdec")
IN_THE_RULE = {
    "probabilities by node number": Fault(probabilities_by_node_number, ("tree, descend",)),
    "nothing renormalised": Fault(nothing_renormalised, ("tree",)),
    "resampling from p": Fault(resampling_from_p, BY_REJECTION),
    "threshold off by one depth": Fault(threshold_off_by_one_depth, BY_REJECTION),
    "one token too many": Fault(one_token_too_many, ("seq", "magicdec")),
    "q is not what was sampled from": Fault(q_is_not_what_was_sampled_from, ("seq", "magicdec")),
}
"""Seen by integrating the rule over its draws, and in what is generated."""
IN_THE_OUTPUT = IN_THE_RULE | {
    "top-k children as samples of q": Fault(top_k_children_as_samples, ("tree",)),
    "siblings out of order": Fault(siblings_out_of_order, ("tree",)),
    "temperature left out": Fault(temperature_left_out, ("seq", "tree, descend", "tree", "magicdec")),
    "greedy first token": Fault(greedy_first_token, ("seq", "tree, descend", "tree", "magicdec")),
    "warpers in another order": Fault(warpers_in_another_order, ("tree, descend",), {"top_p": 0.8}),
}
"""Seen in the distribution of what is generated."""
IN_CORRELATIONS = {
    "rows share their draws": Fault(rows_share_their_draws, ("seq", "tree, descend", "tree", "magicdec")),
    "rounds repeat their draws": Fault(rounds_repeat_their_draws, ("seq", "tree, descend", "tree", "magicdec")),
}
"""Seen in what draws have to do with each other."""
