"""Sampling with settings per row: the distributions that generation follows, and random draws from them.

The random numbers of a row depend on its seed and on the root's position alone, so a row with a seed gets the same
tokens whichever rows run next to it.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from enum import IntEnum
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from longspec.inference.filters import keep_likely
from longspec.inference.request import FILTERS, Sampling, row_seed
from longspec.kernels.backend import Backend
from longspec.kernels.shared.device import upload
from longspec.kernels.shared.watch import Watch
from longspec.kernels.torch.backend import TorchBackend

MOST_DRAWS = 1 << 20
"""Draws of one kind and purpose per round; above the depth of any tree."""


class SamplingKind(NamedTuple):
    """Everything about the settings of a batch that decides which kernels sample."""

    rows: Literal["greedy", "mixed", "sampled"] = "greedy"
    """Whether all rows are greedy, some or none."""
    filters: tuple[str, ...] = ()
    """The names of `request.FILTERS` that are applied, in their order. Rows with a neutral value keep all tokens."""
    largest_k: int = 0
    """The largest top_k of a row, rounded up, if no other filter sorts the vocabulary; 0 for any."""


GREEDY_KIND = SamplingKind()


def sampling_kind(samplings: Sequence[Sampling]) -> SamplingKind:
    """The kind with the fewest kernels that follows all these settings."""
    greedy = sum(sampling.greedy for sampling in samplings)
    if greedy == len(samplings):
        return GREEDY_KIND
    filters = {name for sampling in samplings for name in sampling.filters}
    largest_k = 0
    if "top_k" in filters and "top_p" not in filters and all(s.greedy or s.top_k for s in samplings):
        largest_k = 1 << (max(sampling.top_k for sampling in samplings if not sampling.greedy) - 1).bit_length()
    names = tuple(name for name in FILTERS if name in filters)
    return SamplingKind("mixed" if greedy else "sampled", names, largest_k)


class Purpose(IntEnum):
    """Separates the random numbers of a round by their use."""

    DRAFT = 0
    VERIFY = 1


FIELDS = ("seed", "top_k", "temperature", *(name for name in FILTERS if name != "top_k"))
"""The settings of a row that are numbers: two integers, then fractions."""


class RowSettings:
    """Settings of B rows, in tensors that are changed in place. Greedy rows draft at temperature 1 and keep all tokens.

    Sampling with a repetition penalty or other values that depend on earlier tokens would add its tensors here.
    """

    def __init__(self, numbers: Tensor, greedy: Tensor, positions: Tensor) -> None:
        """The parts of `allocate` or `narrow`."""
        self.numbers = numbers
        """int64 [FIELDS, B]: integers, and the bits of fractions in fp64."""
        self.greedy = greedy
        """bool [B]."""
        self.positions = positions
        """int32 [B]: the root's position. A cache has this tensor as the number of its accepted tokens."""

    @classmethod
    def allocate(cls, rows: int, device: torch.device) -> RowSettings:
        """Greedy rows."""
        numbers = torch.zeros(len(FIELDS), rows, dtype=torch.long, device=device)
        positions = torch.zeros(rows, dtype=torch.int32, device=device)
        settings = cls(numbers, torch.ones(rows, dtype=torch.bool, device=device), positions)
        settings.assign(slice(0, rows), [Sampling()] * rows, [0] * rows)
        return settings

    def narrow(self, rows: slice) -> RowSettings:
        """The consecutive `rows`, in the same tensors."""
        return RowSettings(self.numbers[:, rows], self.greedy[rows], self.positions[rows])

    def __getitem__(self, name: str) -> Tensor:
        """One of FIELDS, [B]: int64 for the first two, fp64 for the others. A top_k above the size of the vocabulary
        keeps all tokens. All 64 bits of a seed count."""
        index = FIELDS.index(name)
        return self.numbers[index] if index < 2 else self.numbers[index].view(torch.float64)

    def assign(self, rows: slice, samplings: Sequence[Sampling], seeds: Sequence[int]) -> None:
        """Set the settings of some rows, without waiting for the device.

        seeds: 0 to 2^64 - 1; they replace those of `samplings`.
        """
        settings = [Sampling(temperature=1.0) if sampling.greedy else sampling for sampling in samplings]
        integers = [[seed - (seed >> 63 << 64) for seed in seeds], [s.top_k or 2**31 for s in settings]]
        fractions = [[getattr(sampling, name) for sampling in settings] for name in FIELDS[2:]]
        packed = torch.cat([torch.tensor(integers), torch.tensor(fractions, dtype=torch.float64).view(torch.long)])
        device = self.numbers.device
        self.numbers[:, rows] = upload(packed, device)
        self.greedy[rows] = upload(torch.tensor([sampling.greedy for sampling in samplings]), device)


class Sampler:
    """The distribution of each row: its argmax at temperature 0, else the softmax over the tokens that filters keep.

    Draft and target use the same settings. Where other rows are sampled, the target of a greedy row has its argmax with
    probability 1, so a greedy row is exact under every rule of acceptance.
    """

    def __init__(self, kind: SamplingKind = GREEDY_KIND, settings: RowSettings | None = None) -> None:
        """settings: not needed for greedy rows."""
        self.backend: Backend | type[Backend] = TorchBackend
        self.kind = kind
        self.greedy = kind.rows == "greedy"
        self._settings = settings
        self.purpose = Purpose.VERIFY

    def on(self, backend: Backend) -> Sampler:
        """The same sampler with the operations of a backend; plain torch's run anywhere."""
        bound = copy(self)
        bound.backend = backend
        return bound

    @property
    def settings(self) -> RowSettings:
        assert self._settings is not None, "only greedy rows have no settings"
        return self._settings

    def drafting(self) -> Sampler:
        """The sampler of the draft, with the same settings."""
        draft = copy(self)
        draft.purpose = Purpose.DRAFT
        return draft

    def after_prefill(self) -> Sampler:
        """The sampler of the first token: it draws as a round whose root is the prompt's last token would."""
        if self.greedy:
            return self
        first = copy(self)
        first._settings = copy(self.settings)
        first._settings.positions = first._settings.positions - 1
        return first

    def temperature_of(self, row: int) -> float:
        """The temperature of a row. Waits for the device."""
        if self.greedy or self.settings.greedy[row]:
            return 0.0
        return float(self.settings["temperature"][row])

    @property
    def temperature(self) -> Tensor | None:
        """The temperature of each row, fp64 [B]; None is 1."""
        return None if self.greedy else self.settings["temperature"]

    def warped(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [B, ..., V] after the filters, and the temperature, [B], that is still to be applied to them.

        A temperature alone is not applied here, because the kernels divide by it while they read the logits. Tokens
        that are left out get -inf; NaN and infinity stay in place.
        """
        if not self.kind.filters:
            return logits, self.temperature
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        scaled = wide / per_row(self.settings["temperature"], logits).to(wide.dtype)
        values = {name: per_row(self.settings[name], logits) for name in self.kind.filters}
        return keep_likely(scaled, values, self.kind.largest_k), None

    def probabilities(self, logits: Tensor, watch: Watch | None = None) -> Tensor:
        """Probabilities [B, ..., V], fp32 or wider, of the distribution; logits [B, ..., V]."""
        warped, temperature = self.warped(logits)
        if self.kind.rows == "mixed" and self.purpose != Purpose.DRAFT:
            tokens = torch.arange(logits.shape[-1], device=logits.device)
            # NaN and infinity win the argmax, and stay in place.
            others = tokens != self.backend.argmax(logits)[..., None]
            warped = warped.masked_fill(per_row(self.settings.greedy, logits) & others, -torch.inf)
        return self.backend.softmax(warped, temperature, watch)

    def choose(self, logits: Tensor, watch: Watch | None = None) -> Tensor:
        """One token per distribution, LongTensor [B, ...]: the argmax of logits [B, ..., V] if greedy, else a draw."""
        if self.greedy:
            return self.backend.argmax(logits, watch)
        return self.draw(self.probabilities(logits, watch))

    def draw(self, weights: Tensor, step: int = 0) -> Tensor:
        """Independent draws, LongTensor [B, ...], in proportion to weights [B, ..., V], which need not be normalized.

        step: number of the draw within the round; draws of one number are equal.
        """
        # Not torch.multinomial, which waits for the device and draws its noise in fp32 (see `exponentials`).
        return self.backend.first_arrival(weights, self.exponentials(weights, step))

    def uniforms(self, like: Tensor) -> Tensor:
        """Independent uniform numbers in [0, 1), fp64, with the shape of `like`, [B, ...]."""
        # fp32 uniforms are multiples of 6e-8, too coarse for improbable tokens of a large vocabulary.
        settings, stream = self.settings, self._stream(0, 0)
        return self.backend.row_noise(settings["seed"], settings.positions, stream, like.shape[1:])

    def exponentials(self, like: Tensor, step: int = 0, first: int = 0) -> Tensor:
        """Independent exponential numbers of rate 1, fp64, with the shape of `like`, [B, ...]; `first` as in
        `Backend.row_noise`.

        Constant in greedy rows: these draw the most probable token, and grow the same tree in every run.
        """
        # CUDA's fp32 exponentials are never below 6e-8, so `draw` could not draw tokens of that probability.
        settings, stream = self.settings, self._stream(1, step)
        numbers = settings["seed"], settings.positions, stream, like.shape[1:], settings.greedy, first
        return self.backend.row_noise(*numbers)

    def exponentials_by_part(self, like: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """`exponentials` for like [B, N, V], split along N into contiguous parts of `widths`."""
        if len(like) == 1:  # one launch draws all
            return list(self.exponentials(like).split(list(widths), 1))
        parts, first = [], 0
        for part in like.split(list(widths), 1):
            parts.append(self.exponentials(part, first=first))
            first += part[0].numel()
        return parts

    def _stream(self, kind: int, step: int) -> int:
        """kind: 0 for uniform numbers, 1 for exponential ones."""
        return (2 * self.purpose + kind) * MOST_DRAWS + step


def row_seeds(seed: int | Sequence[int] | None, rows: int, greedy: bool) -> list[int]:
    """The seed of each row: as given, or from one seed.

    None draws that one from torch's global generator, unless rows are greedy.
    """
    if isinstance(seed, Sequence):
        return list(seed)
    if seed is None:
        seed = 0 if greedy else int(torch.randint(2**63 - 1, ()))
    return [row_seed(seed, row) for row in range(rows)]


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """values [B] with the dimensions of like [B, ..., V]."""
    return values.view(-1, *[1] * (like.dim() - 1))


GREEDY = Sampler()
"""The sampler of greedy rows."""
