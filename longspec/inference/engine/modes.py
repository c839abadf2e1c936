"""The modes of a batch's rounds, and the drafters that they need, also where only some rows speculate."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from longspec.inference.adaptive.plan_drafters import PlanDrafters, plans_for
from longspec.inference.adaptive.plans import Plan
from longspec.inference.cache import TargetCache
from longspec.inference.drafting.proposal import Drafter, Proposal, WrappedDrafter
from longspec.inference.engine.round_record import Report
from longspec.inference.methods import AUTO, Drafting, make_drafter
from longspec.inference.request import FILTERS
from longspec.inference.runner import Runner
from longspec.inference.sampling import GREEDY_KIND, Sampler, SamplingKind

KINDS = (GREEDY_KIND, *(SamplingKind("mixed", names) for names in ((), ("top_k", "top_p"), tuple(FILTERS))))
"""The kinds of sampling in order of what their rounds can do. The last one is captured when it is first needed, and so
are all with penalties, which are those of SERVED_PENALTIES."""


class Mode(NamedTuple):
    """The rounds of one mode launch the same kernels."""

    speculates: bool
    """Whether any row speculates."""
    sampling: SamplingKind
    """One of KINDS, with or without penalties."""
    plan: Plan | None = None
    """The plan of method "auto", if any row speculates."""
    details: bool = True
    """Whether log-probabilities and traces are reported."""
    scores: bool = False
    """Whether rounds report `round_record.scores`. They are not captured, because few requests ask for it."""

    @property
    def report(self) -> Report:
        ranks = self.plan is not None and self.plan.kind == "tree"
        return Report(ranks, self.details, self.scores)


def new_drafter(runner: Runner, drafting: Drafting, rows: int, sampler: Sampler, is_served: bool) -> Drafter:
    """The drafter of a method. sampler: the draft's. is_served: whether "auto" is to have few plans, because their
    rounds exist for several batch sizes and ways to sample."""
    if drafting.method != AUTO:
        return make_drafter(drafting, runner, rows, sampler)
    plans = plans_for(drafting, runner.device.type == "cpu", rows, is_served)
    return PlanDrafters(runner, rows, sampler, plans, drafting)


class SelectiveDrafter(WrappedDrafter):
    """Reduces the proposals of another drafter to the root in all other rows, which then emit one token per round. A
    root without children accepts nothing, and its bonus token follows the target's whole distribution."""

    def __init__(self, drafter: Drafter, speculates: Tensor) -> None:
        """speculates: bool [B], changed in place from outside."""
        super().__init__(drafter)
        self.speculates = speculates

    def propose(self, root: Tensor, cache: TargetCache) -> Proposal:
        proposal = self.drafter.propose(root, cache)
        return replace(proposal, parents=torch.where(self.speculates[:, None], proposal.parents, -1))
