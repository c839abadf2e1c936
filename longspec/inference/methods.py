"""The methods: one engine, and a drafting strategy for each. Importing the names and defaults loads no library."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from longspec.inference.acceptance import Sampler
    from longspec.inference.drafting.proposal import Drafter
    from longspec.inference.runner import Runner

METHODS = ("vanilla", "seq", "tree", "magicdec", "lookup")
GLIDE_METHODS = ("seq", "tree")
"""The methods that draft with the GLIDE layer."""
TREE_RULES = ("reject", "descend")
AUTO = "auto"
"""The tree shape that is measured: see `longspec.inference.tree_shapes`."""
DEFAULT_SHAPE = (4, 16, 16, 16, 16)


def make_drafter(
    method: str,
    runner: Runner,
    batch: int,
    sampler: Sampler,
    tree_shape: Sequence[int],
    gamma: int,
    tree_rule: str,
) -> Drafter:
    """The drafter of one of METHODS for `batch` rows; a tree is for one of TREE_RULES."""
    from longspec.inference.drafting.chain import ChainDrafter, NoDraft
    from longspec.inference.drafting.glide import GlideDraft
    from longspec.inference.drafting.lookup import LookupDrafter
    from longspec.inference.drafting.magicdec import SparseTarget
    from longspec.inference.drafting.tree import TreeDrafter

    if method == "tree":
        return TreeDrafter(runner, batch, tree_shape, sampler, tree_rule)
    if method == "seq":
        return ChainDrafter(GlideDraft(runner, batch, gamma), gamma, sampler)
    if method == "magicdec":
        return ChainDrafter(SparseTarget(runner, gamma), gamma, sampler)
    if method == "lookup":
        return LookupDrafter(runner, batch, gamma)
    return NoDraft()
