"""Counts and times of generations, and their sums."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest

SETUP = ("build_s", "warm_up_s", "capture_s", "measure_s")
"""Times of a call that are part of neither `ttft_s` nor `decode_s`."""


@dataclass
class GenerationStats:
    """Counts and times of a generation, of unfinished rows, without prefill and its token."""

    rounds: int = 0
    """Number of verification passes, summed over rows."""
    row_rounds: list[int] = field(default_factory=list)
    """Number of verification passes of each row."""
    decoded_tokens: int = 0
    """Number of tokens emitted by verification passes, bonus tokens included."""
    accepted_by_depth: list[int] = field(default_factory=list)
    """Entry d - 1: number of passes that emitted at least d draft tokens."""
    ttft_s: float = 0.0
    """Time to first token, in seconds: prefill, without the times of SETUP."""
    decode_s: float = 0.0
    """Time of all rounds, in seconds, without the times of SETUP."""
    peak_memory_bytes: int = 0
    """Peak of memory allocated on the CUDA device during the call; 0 on a CPU."""
    tree_shape: tuple[int, ...] = ()
    """Number of nodes in each level of the drafted trees; empty for other methods."""
    rounds_by_plan: dict[str, int] = field(default_factory=dict)
    """Number of rounds of the batch per plan of method "auto"; empty for other methods."""
    tree_nodes: int = 0
    """Number of nodes of each tree that were verified, the root included; 0 for other methods."""
    build_s: float = 0.0
    """Time to set up caches and layers, in seconds; little if an earlier call did."""
    warm_up_s: float = 0.0
    """Time to compile the kernels of a round, in seconds; 0 if an earlier call did."""
    capture_s: float = 0.0
    """Time to record CUDA graphs, in seconds: of rounds, and of passes over prompts with the compilation of
    their kernels; 0 if an earlier call did."""
    measure_s: float = 0.0
    """Time of the measurements of "auto", in seconds; 0 if they are cached."""

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens emitted per verification pass; nan before the first pass."""
        return self.decoded_tokens / self.rounds if self.rounds else float("nan")

    @property
    def setup(self) -> dict[str, float]:
        """The times of SETUP by name. Most of them are paid by the first call of its kind only."""
        return {name: getattr(self, name) for name in SETUP}

    @property
    def tokens_per_second(self) -> float:
        """Decoding speed over all rows; nan before the first pass."""
        return self.decoded_tokens / self.decode_s if self.decode_s else float("nan")


def pool(batches: Sequence[GenerationStats]) -> GenerationStats:
    """The sums over several calls of `generate`, so that every verification pass has the same weight."""
    by_depth = zip_longest(*(stats.accepted_by_depth for stats in batches), fillvalue=0)
    summed = ("rounds", "decoded_tokens", "ttft_s", "decode_s", *SETUP)
    return GenerationStats(
        rounds_by_plan=dict(sum((Counter(stats.rounds_by_plan) for stats in batches), Counter())),
        accepted_by_depth=[sum(counts) for counts in by_depth],
        tree_shape=next((stats.tree_shape for stats in batches), ()),
        tree_nodes=max((stats.tree_nodes for stats in batches), default=0),
        peak_memory_bytes=max((stats.peak_memory_bytes for stats in batches), default=0),
        **{name: sum(getattr(stats, name) for stats in batches) for name in summed},
    )
