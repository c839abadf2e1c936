"""The plans that "auto" chooses from."""

from __future__ import annotations

from typing import Literal, NamedTuple


class Plan(NamedTuple):
    """A way to play a round."""

    kind: Literal["vanilla", "lookup", "tree"]
    nodes: int
    """Nodes that the target verifies, the root included."""
    levels: int = 0
    """Number of levels that the draft grows; 0 for other plans than trees."""

    @property
    def name(self) -> str:
        if self.kind == "vanilla":
            return self.kind
        return f"{self.kind} {self.nodes}" + (f" of {self.levels} levels" if self.levels else "")

    @property
    def feeds_draft(self) -> bool:
        """Whether its rounds feed the draft, whose window must be filled before. To feed it in rounds of other plans
        would cost a small target some percent of a round."""
        return self.kind == "tree"

    def covers(self, other: Plan) -> bool:
        """Whether a round of this tree tells what another tree would have accepted."""
        return self.kind == "tree" and other.nodes <= self.nodes and other.levels <= self.levels


VANILLA = Plan("vanilla", 1)
LOOKUPS: tuple[Plan, ...] = (Plan("lookup", 5), Plan("lookup", 16))
"""Chains from prompt lookup of 4 and 15 tokens."""
TREES: tuple[tuple[int, int | None], ...] = ((16, 2), (16, None), (32, 3), (32, None), (64, None))
"""Nodes and levels of the draft trees, in increasing order; None for all levels. Fewer levels take less time."""
CPU_TREES = ((6, 2), (12, 4))
"""The trees on a CPU, where the time of a round soon grows with the number of nodes: one and two times the tokens that
`kernels.native` multiplies at once."""
CPU_WIDTH = 3
"""Largest width of a level of these trees. Wider levels hardly add accepted tokens, but take longer."""
SERVED_LOOKUPS, SERVED_TREES = LOOKUPS[-1:], ((16, 2), (32, 3), (32, None))
"""The lookup plans and the trees of a server, which has rounds for several batch sizes and ways to sample."""
MOST_NODES = max(nodes for nodes, _ in TREES)
