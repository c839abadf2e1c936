"""The sampling settings of a request. Importing this module loads no library."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0}
"""The settings that leave tokens out, in transformers' order, with the value that keeps all tokens."""
FILTER_OPTIONS = ("min_p", "typical_p", "epsilon_cutoff")
"""Those that a target's generation config sets, too."""
SEED_STEP = 0x9E3779B97F4A7C15
"""Difference of the seeds of two neighboring rows: nearby seeds do not give rows in common."""
ALWAYS = 2**31 - 1
"""`Rule.until` of a rule without an end."""


def row_seed(seed: int, row: int) -> int:
    """The seed of a row of a batch, or of a prompt of a file, from that of row 0."""
    return (seed + row * SEED_STEP) % 2**64


class Rule(NamedTuple):
    """A bias of one token."""

    token: int
    bias: float
    """Added to the token's logit; minus infinity bans it."""
    after: tuple[int, ...] = ()
    """The rule applies where the text, prompt included, ends with these tokens."""
    until: int = ALWAYS
    """The rule applies to the first `until` new tokens."""


class PenaltyKind(NamedTuple):
    """Which penalties a batch has, and how much of each. It decides which operations run."""

    repetition: bool = False
    counts: bool = False
    """Whether any row has a presence or frequency penalty."""
    rules: int = 0
    """Largest number of rules of a row; this and the next two are powers of two, or 0."""
    context: int = 0
    """Length of the longest `Rule.after`."""
    ngram: int = 0
    """Largest no_repeat_ngram_size."""

    @property
    def window(self) -> int:
        """Number of newest tokens that rules and n-grams compare."""
        return max(self.context, self.ngram - 1)

    def covers(self, other: "PenaltyKind") -> bool:
        return all(own >= its for own, its in zip(self, other, strict=True))


def joined_penalties(samplings: "Sequence[Sampling]") -> PenaltyKind | None:
    """The smallest kind that covers the penalties of all these settings; None if none has any."""
    kinds = [sampling.penalties for sampling in samplings if sampling.penalties is not None]
    return PenaltyKind(*map(max, zip(*kinds, strict=True))) if kinds else None


def _power_of_two(number: int) -> int:
    """`number` rounded up; 0 stays."""
    return 1 << (number - 1).bit_length() if number else 0


@dataclass(frozen=True)
class Sampling:
    """The distribution of one request. Penalties, the n-gram size and rules also apply at temperature 0."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    seed: int | None = None
    """None draws a fresh seed."""
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int = 0
    rules: tuple[Rule, ...] = ()
    """Those of biases, bad words, suppressed tokens and least lengths (see `token_options`)."""

    @cached_property
    def penalties(self) -> PenaltyKind | None:
        """None if the distribution of a token depends on the target's logits alone."""
        kind = PenaltyKind(
            self.repetition_penalty != 1,
            bool(self.presence_penalty or self.frequency_penalty),
            _power_of_two(len(self.rules)),
            _power_of_two(max((len(rule.after) for rule in self.rules), default=0)),
            _power_of_two(self.no_repeat_ngram_size),
        )
        return kind if any(kind) else None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filters(self) -> tuple[str, ...]:
        """The names of FILTERS that have an effect."""
        return () if self.greedy else tuple(name for name, neutral in FILTERS.items() if getattr(self, name) != neutral)
