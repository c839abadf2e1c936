"""The plans that "auto" chooses from."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Plan(NamedTuple):
    """A way to play a round."""

    kind: Literal["vanilla", "lookup", "tree"]
    nodes: int
    """Nodes that the target verifies, the root included."""
    depth: int
    """Largest number of proposed tokens that a round accepts."""

    @property
    def name(self) -> str:
        return self.kind if self.kind == "vanilla" else f"{self.kind} {self.nodes}"


def lookup(nodes: int) -> Plan:
    """A chain from prompt lookup."""
    return Plan("lookup", nodes, nodes - 1)


VANILLA = Plan("vanilla", 1, 0)
LOOKUPS = (lookup(5), lookup(16))
TREE_NODES = (16, 32, 64)
"""Node budgets of the draft trees, in increasing order."""
SERVED_LOOKUP, SERVED_NODES = LOOKUPS[-1], 32
"""The lookup plan and the largest tree of a server, which has rounds for several batch sizes and ways to sample."""
