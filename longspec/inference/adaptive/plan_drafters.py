"""The drafters of all plans of a batch, on shared state: the draft's window, its tree, and the history of tokens."""

from collections.abc import Hashable, Sequence
from copy import copy
from typing import TYPE_CHECKING

from torch import Tensor

from longspec.inference.adaptive.plans import Plan
from longspec.inference.drafting.chain import NoDraft
from longspec.inference.drafting.lookup import LookupBranches, LookupDrafter, TokenHistory
from longspec.inference.drafting.proposal import Drafter, WrappedDrafter
from longspec.inference.drafting.row_state import RowState
from longspec.inference.drafting.tree import TreeDrafter
from longspec.inference.runner import Runner
from longspec.inference.sampling import Sampler

if TYPE_CHECKING:
    from longspec.inference.methods import Drafting

VANILLA = Plan("vanilla", 1)
LOOKUPS: tuple[Plan, ...] = (Plan("lookup", 5), Plan("lookup", 16))
"""Chains from prompt lookup of 4 and 15 tokens."""
TREES: tuple[tuple[int, int | None], ...] = ((16, 2), (16, None), (32, 3), (32, None), (64, None))
"""Nodes and levels of the draft trees, in increasing order; None for all levels. Fewer levels take less time."""
MANY_ROWS, MANY_ROWS_TREES = 16, ((4, 2), (8, 3), (16, None), (32, None))
"""Number of rows from which a batch has these trees: a GPU verifies about a hundred tokens in the time of one."""
CPU_TREES = ((6, 2), (12, 4))
"""The trees on a CPU: one and two times the tokens that `kernels.native` multiplies at once."""
CPU_WIDTH = 3
"""Largest width of a level of these trees. Wider levels hardly add accepted tokens, but take longer."""
SERVED_LOOKUPS, SERVED_TREES = LOOKUPS[-1:], ((16, 2), (32, 3), (32, None))
"""The lookup plans and the trees of a server, which has rounds for several batch sizes and ways to sample."""
MOST_NODES = max(nodes for nodes, _ in TREES)


def plans_for(drafting: "Drafting", on_cpu: bool, rows: int, is_served: bool = False) -> tuple[Plan, ...]:
    """The plans of a batch: vanilla, lookup, and trees in ascending order if there is a draft. A server has fewer."""
    lookups, trees = LOOKUPS, TREES if rows < MANY_ROWS else MANY_ROWS_TREES
    if is_served:
        lookups, trees = SERVED_LOOKUPS, SERVED_TREES
    if drafting.gamma + 1 != LOOKUPS[0].nodes:  # the default's
        lookups = (Plan("lookup", drafting.gamma + 1),)
    if not drafting.has_draft:
        return (VANILLA, *lookups)
    # A small shape is the same tree under several budgets.
    shapes = [(nodes, drafting.tree_shape[:levels]) for nodes, levels in (CPU_TREES if on_cpu else trees)]
    most = drafting.tree_nodes or MOST_NODES
    budgets = {Plan("tree", min(nodes, most, 1 + sum(shape)), len(shape)) for nodes, shape in shapes}
    return (VANILLA, *lookups, *sorted(budgets))


class PlanDrafters(Drafter):
    """The drafter of an engine with several plans. It reads the prompts; each plan proposes with its own drafter."""

    def __init__(
        self, runner: Runner, batch: int, sampler: Sampler, plans: Sequence[Plan], drafting: "Drafting"
    ) -> None:
        self.plans = tuple(plans)
        self.nodes = max(plan.nodes for plan in self.plans)
        self.depth = max(plan.nodes - 1 for plan in self.plans if plan.kind != "tree")
        self.history = TokenHistory(batch, runner.device)
        self.tree: TreeDrafter | None = None
        if any(plan.kind == "tree" for plan in plans):
            tree_shape, branches = drafting.tree_shape, LookupBranches(runner, self.history)
            if runner.device.type == "cpu":
                tree_shape = [min(width, CPU_WIDTH) for width in tree_shape]
            self.tree = TreeDrafter(runner, batch, tree_shape, sampler, drafting.tree_rule, lookup=branches)
            self.depth = max(self.depth, self.tree.depth)
            self.reads_hidden, self.layer_inputs = self.tree.reads_hidden, self.tree.layer_inputs
        self.kind: Hashable = (type(self), self.plans, None if self.tree is None else self.tree.kind)

    def for_plan(self, plan: Plan | None) -> WrappedDrafter:
        """It feeds the history of tokens, and the draft if the plan is a tree."""
        assert plan is not None
        drafter: Drafter = NoDraft()
        if plan.kind == "lookup":
            drafter = LookupDrafter(self.history, plan.nodes - 1)
        elif plan.kind == "tree":
            assert self.tree is not None
            drafter = self.tree.cut(plan.nodes, plan.levels)
        wrapped = WrappedDrafter(drafter)
        # What the target computes at a token is gone after its round, so the rounds of each plan pass it on.
        wrapped.parts = [self.history]
        if self.tree is not None and (plan.kind == "tree" or self.layer_inputs):
            wrapped.parts.append(self.tree.draft)
        wrapped.reads_hidden, wrapped.layer_inputs = self.reads_hidden, self.layer_inputs
        return wrapped

    def share(self, rows: slice, sampler: Sampler) -> "PlanDrafters":
        part = copy(self)
        part.history = self.history.narrow(rows)
        if self.tree is not None:
            part.tree = self.tree.share(rows, sampler)
        return part

    @property
    def parts(self) -> list[RowState]:  # type: ignore[override]
        return [self.history] if self.tree is None else [self.tree]  # which has the same history

    def refill(self, lengths: Tensor) -> None:
        if self.tree is not None and not self.layer_inputs:
            self.tree.draft.refill(self.history.tokens, lengths.long())
