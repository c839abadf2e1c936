"""The sampling settings of a request. Importing this module loads no library."""

from __future__ import annotations

from dataclasses import dataclass

FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0}
"""The settings that leave tokens out, in the order in which transformers applies them, with the value that keeps all
tokens."""


SEED_STEP = 0x9E3779B97F4A7C15
"""Difference of the seeds of two neighboring rows: nearby seeds do not give rows in common."""


def row_seed(seed: int, row: int) -> int:
    """The seed of a row of a batch, or of a prompt of a file, whose own seed is `seed`; row 0 has this seed itself."""
    return (seed + row * SEED_STEP) % 2**64


@dataclass(frozen=True)
class Sampling:
    """The distribution of one request; the meaning of each field is that of `longspec.generate`."""

    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps all tokens."""
    seed: int | None = None
    """0 … 2^64 - 1; None draws a fresh seed."""
    min_p: float = 0.0
    typical_p: float = 1.0
    epsilon_cutoff: float = 0.0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def filters(self) -> tuple[str, ...]:
        """The names of FILTERS that have an effect."""
        return () if self.greedy else tuple(name for name, neutral in FILTERS.items() if getattr(self, name) != neutral)
