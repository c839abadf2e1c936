"""The decoding methods: one engine with a drafter per method. Importing this module loads no other library."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from longspec.errors import UserError

if TYPE_CHECKING:
    from longspec.inference.drafting.proposal import Drafter
    from longspec.inference.runner import Runner
    from longspec.inference.sampling import Sampler

METHODS = ("vanilla", "seq", "tree", "magicdec", "lookup")
"""The methods that draft in one way."""
GLIDE_METHODS = ("seq", "tree")
"""The methods that need a trained GLIDE draft."""
TREE_RULES = ("reject", "descend")
"""The ways to draft and accept a tree above temperature 0 (see `drafting.tree`)."""
AUTO = "auto"
"""The method that chooses between vanilla, lookup and draft trees before each round (see `adaptive`)."""
LONGEST_MATCH = 3
"""Maximum length of a match of prompt lookup in tokens, the root included."""
DEFAULT_SHAPE = (4, 16, 16, 16, 16)
"""The paper's tree: number of nodes in each level below the root."""


MakeDrafter = Callable[["Runner", int, int], "Drafter"]
"""(runner, batch, gamma) -> a drafter for `batch` rows."""
_own: dict[str, MakeDrafter] = {}


def register_method(name: str, make: MakeDrafter) -> None:
    """Make a drafting method available as `method=NAME` of `longspec.generate` in this process.

    make: called with the model's runner, the number of rows and the argument `gamma`; returns a `Drafter`. The output
    is that of the target whatever the drafter proposes. Raises UserError for a name that exists.
    """
    if name in (*method_names(), AUTO):
        raise UserError(f"register_method: there is a method {name!r}; choose another name")
    _own[name] = make


def method_names() -> tuple[str, ...]:
    """METHODS and the registered ones."""
    return (*METHODS, *_own)


def make_drafter(
    method: str,
    runner: Runner,
    batch: int,
    sampler: Sampler,
    tree_shape: Sequence[int],
    gamma: int,
    tree_rule: str,
    tree_nodes: int | None = None,
    lookup_branches: bool = False,
) -> Drafter:
    """The drafter of one of `method_names()` for `batch` rows.

    tree_shape, tree_rule, tree_nodes and lookup_branches apply to method tree only; tree_nodes: nodes to be verified,
    the root included, None for all. gamma is the chain length of seq, magicdec, lookup and registered methods.
    """
    if method in _own:
        return _own[method](runner, batch, gamma)
    from longspec.inference.drafting.chain import ChainDrafter, NoDraft
    from longspec.inference.drafting.glide import GlideDraft
    from longspec.inference.drafting.lookup import LookupBranches, LookupDrafter
    from longspec.inference.drafting.magicdec import SparseTarget
    from longspec.inference.drafting.tree import TreeDrafter

    if method == "tree":
        # A round feeds as many tokens as its longest path has, and the draft's ring takes at most a window of them.
        depth = runner.model.draft_model.window - 1
        lookup = LookupBranches(batch, depth, runner.device) if lookup_branches else None
        return TreeDrafter(runner, batch, tree_shape, sampler, tree_rule, nodes=tree_nodes, lookup=lookup)
    if method == "seq":
        return ChainDrafter(GlideDraft(runner, batch, gamma), gamma, sampler)
    if method == "magicdec":
        return ChainDrafter(SparseTarget(runner, gamma), gamma, sampler)
    if method == "lookup":
        return LookupDrafter(batch, gamma, runner.device)
    return NoDraft()
