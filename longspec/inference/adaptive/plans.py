"""The plans that "auto" chooses from; `plan_drafters` has those of each device."""

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

    def covers(self, other: "Plan") -> bool:
        """Whether a round of this tree tells what another tree would have accepted."""
        return self.kind == "tree" and other.nodes <= self.nodes and other.levels <= self.levels
