"""Sampling settings per row, in device tensors, and samplers that follow them.

The random numbers of a row depend on its seed and on the root's position alone, so a seeded request gets the same
tokens whichever requests run next to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import IntEnum

import torch
from torch import Tensor

from longspec.inference.sampling import Sampler
from longspec.inference.server.requests import Sampling
from longspec.kernels.decoding.row_noise import row_exponentials, row_uniforms
from longspec.kernels.decoding.vocabulary import argmax
from longspec.kernels.decoding.vocabulary import probabilities as softmax
from longspec.kernels.shared.watch import Watch

MOST_DRAWS = 1 << 20
"""Draws of one kind and purpose per round; above the depth of any tree."""


class Purpose(IntEnum):
    """Separates the random numbers of a round by their use."""

    DRAFT = 0
    VERIFY = 1
    FIRST = 2
    """The first token of an answer, chosen after prefill."""


@dataclass
class RowSettings:
    """Settings of B rows; every tensor is [B] and is changed in place."""

    seeds: Tensor
    """int64, all 64 bits count."""
    greedy: Tensor
    """bool. Greedy rows draft at temperature 1, without truncation."""
    temperature: Tensor
    """fp32, above 0."""
    top_k: Tensor
    """int64, 1 … V; V keeps all tokens."""
    top_p: Tensor
    """fp64, above 0; 1 keeps all tokens."""
    positions: Tensor
    """int: the root's position, which is the number of accepted tokens of the cache."""

    @classmethod
    def allocate(cls, positions: Tensor, vocab: int) -> RowSettings:
        """Greedy rows for a cache with `positions` as its lengths."""
        rows, device = len(positions), positions.device
        return cls(
            seeds=torch.zeros(rows, dtype=torch.long, device=device),
            greedy=torch.ones(rows, dtype=torch.bool, device=device),
            temperature=torch.ones(rows, device=device),
            top_k=torch.full((rows,), vocab, dtype=torch.long, device=device),
            top_p=torch.ones(rows, dtype=torch.float64, device=device),
            positions=positions,
        )

    def narrow(self, rows: slice) -> RowSettings:
        """The consecutive `rows`, in the same tensors."""
        return RowSettings(*(getattr(self, field.name)[rows] for field in fields(self)))

    def assign(self, row: int, sampling: Sampling, seed: int, vocab: int) -> None:
        """Make `sampling` the settings of a row; seed: 0 to 2^64 - 1; it replaces that of `sampling`."""
        greedy = sampling.temperature == 0
        self.seeds[row] = seed - 2**64 if seed >= 2**63 else seed
        self.greedy[row] = greedy
        self.temperature[row] = 1.0 if greedy else sampling.temperature
        self.top_k[row] = vocab if greedy or sampling.top_k == 0 else min(sampling.top_k, vocab)
        self.top_p[row] = 1.0 if greedy else sampling.top_p


class RowSampler(Sampler):
    """The distributions of `RowSettings`. The target of a greedy row has its argmax with probability 1.

    So a greedy row is exact under every rule of acceptance, next to rows that sample.
    """

    def __init__(self, settings: RowSettings, truncates: bool, purpose: Purpose) -> None:
        """truncates: whether top-k and top-p are applied; they sort the vocabulary."""
        super().__init__(temperature=1.0, top_k=0, top_p=1.0)
        self.settings = settings
        self.truncates = truncates
        self.purpose = purpose
        self._draws = [0, 0]

    def rewind(self) -> None:
        """Called before a round: its first draw of a kind gets the same stream in every round."""
        self._draws = [0, 0]

    def warped(self, logits: Tensor) -> tuple[Tensor, float]:
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scaled = wide / self._per_row(self.settings.temperature, logits)
        if not self.truncates:
            return scaled, 1.0
        top_k, top_p = self._per_row(self.settings.top_k, logits), self._per_row(self.settings.top_p, logits)
        return truncate(scaled, top_k, top_p), 1.0

    def probabilities(self, logits: Tensor, watch: Watch | None = None) -> Tensor:
        warped, temperature = self.warped(logits)
        if self.purpose != Purpose.DRAFT:
            tokens = torch.arange(logits.shape[-1], device=logits.device)
            others = tokens != argmax(logits)[..., None]  # NaN and infinity win the argmax, and stay in place
            warped = warped.masked_fill(self._per_row(self.settings.greedy, logits) & others, -torch.inf)
        return softmax(warped, temperature, watch)

    def uniforms(self, like: Tensor) -> Tensor:
        settings = self.settings
        return row_uniforms(settings.seeds, settings.positions, self._next_stream(0), like.shape[1:])

    def exponentials(self, like: Tensor) -> Tensor:
        """Constant in greedy rows: these draw the most probable token, and grow the same tree in every run."""
        settings = self.settings
        stream = self._next_stream(1)
        return row_exponentials(settings.seeds, settings.positions, stream, like.shape[1:], settings.greedy)

    def exponentials_by_part(self, like: Tensor, widths: Sequence[int]) -> list[Tensor]:
        return [self.exponentials(part) for part in like.split(list(widths), 1)]

    def _next_stream(self, kind: int) -> int:
        """kind: 0 for uniform numbers, 1 for exponential ones; their counts are separate."""
        number = self._draws[kind]
        self._draws[kind] += 1
        return (2 * self.purpose + kind) * MOST_DRAWS + number

    @staticmethod
    def _per_row(values: Tensor, like: Tensor) -> Tensor:
        """values [B] with the dimensions of like [B, ..., V]."""
        return values.view(-1, *[1] * (like.dim() - 1))


def truncate(logits: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """transformers' top-k warper, then its top-p warper: dropped tokens get -inf, NaN and infinity stay in place.

    logits: fp32 [B, ..., V], or with fewer columns; top_k, int64, and top_p, fp64: [B, ..., 1] with 1 in every
    dimension but the first.
    """
    # One sort serves both warpers. Ascending, because transformers sums the probabilities from the least likely token.
    ascending, order = logits.sort(dim=-1)
    kth = (logits.shape[-1] - top_k).clamp(min=0).expand(*logits.shape[:-1], 1)
    ascending = ascending.masked_fill(ascending < ascending.gather(-1, kth), -torch.inf)
    mass = ascending.softmax(-1).cumsum(-1)
    is_dropped = (mass <= 1 - top_p) & (top_p < 1)
    is_dropped[..., -1] = False  # at least one token stays
    return torch.empty_like(logits).scatter(-1, order, ascending.masked_fill(is_dropped, -torch.inf))
