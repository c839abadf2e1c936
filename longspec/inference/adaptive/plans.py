"""The plans that "auto" chooses from."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Plan(NamedTuple):
    """A way to play a round."""

    kind: Literal["vanilla", "lookup", "tree"]
    nodes: int
    """Nodes that the target verifies, the root included."""

    @property
    def name(self) -> str:
        return self.kind if self.kind == "vanilla" else f"{self.kind} {self.nodes}"


VANILLA = Plan("vanilla", 1)
LOOKUPS = (Plan("lookup", 5), Plan("lookup", 16))
"""Chains from prompt lookup of 4 and 15 tokens."""
TREE_NODES = (16, 32, 64)
"""Node budgets of the draft trees, in increasing order."""
SERVED_LOOKUP, SERVED_NODES = LOOKUPS[-1], 32
"""The lookup plan and the largest tree of a server, which has rounds for several batch sizes and ways to sample."""
