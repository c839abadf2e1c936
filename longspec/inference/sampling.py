"""Sampling with settings per row. A row's random numbers depend on its seed and on the root's position alone."""

from collections.abc import Sequence
from copy import copy
from typing import TYPE_CHECKING, Literal, NamedTuple

import torch
from torch import Tensor

from longspec.inference.filters import keep_likely
from longspec.inference.penalties import Nodes, RowTerms, penalize
from longspec.inference.request import FILTERS, PenaltyKind, Sampling, joined_penalties, row_seed
from longspec.inference.row_settings import PenaltyRows, RowSettings
from longspec.kernels.backend import Backend
from longspec.kernels.shared.watch import Watch
from longspec.kernels.torch.vocabulary import over_temperature

if TYPE_CHECKING:
    from longspec.inference.drafting.proposal import Proposal

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
    penalties: PenaltyKind | None = None
    """None if no logits depend on earlier tokens."""


GREEDY_KIND = SamplingKind()


def sampling_kind(samplings: Sequence[Sampling]) -> SamplingKind:
    """The kind with the fewest kernels that follows all these settings."""
    greedy = sum(sampling.greedy for sampling in samplings)
    penalties = joined_penalties(samplings)
    if greedy == len(samplings):
        return GREEDY_KIND._replace(penalties=penalties)
    filters = {name for sampling in samplings for name in sampling.filters}
    largest_k = 0
    if "top_k" in filters and "top_p" not in filters and all(s.greedy or s.top_k for s in samplings):
        largest_k = 1 << (max(sampling.top_k for sampling in samplings if not sampling.greedy) - 1).bit_length()
    names = tuple(name for name in FILTERS if name in filters)
    return SamplingKind("mixed" if greedy else "sampled", names, largest_k, penalties)


class Sampler:
    """The distribution of each row: its argmax at temperature 0, else the softmax over the tokens that filters keep.
    Next to sampled rows, a greedy row's argmax has probability 1, which is exact under every rule."""

    def __init__(self, kind: SamplingKind = GREEDY_KIND, settings: RowSettings | None = None) -> None:
        """settings: not needed for greedy rows without penalties."""
        self.backend: Backend | type[Backend] = Backend
        self.kind = kind
        self.greedy = kind.rows == "greedy"
        self._settings = settings
        self.drafts = False
        """Whether it is the draft's. Separates the random numbers of a round by their use."""

    def on(self, backend: Backend) -> "Sampler":
        """The same sampler with the operations of a backend; plain torch's run anywhere."""
        bound = copy(self)
        bound.backend = backend
        return bound

    @property
    def settings(self) -> RowSettings:
        assert self._settings is not None, "only greedy rows without penalties have no settings"
        return self._settings

    @property
    def positions(self) -> Tensor | None:
        """The roots' positions, int32 [B]; None without settings."""
        return None if self._settings is None else self._settings.positions

    def drafting(self) -> "Sampler":
        """The sampler of the draft, with the same settings."""
        draft = copy(self)
        draft.drafts = True
        return draft

    def after_prefill(self) -> "Sampler":
        """The sampler of the first token: it draws as a round whose root is the prompt's last token would."""
        if self._settings is None:
            return self
        first = copy(self)
        first._settings = copy(self.settings)
        first._settings.positions = first._settings.positions - 1
        return first

    def first_tokens(
        self, logits: Tensor, prompts: Tensor, lengths: Sequence[int], watch: Watch | None = None
    ) -> Tensor:
        """The first tokens of answers, LongTensor [B]; logits [B, V]: at the last tokens of the prompts. prompts:
        LongTensor [B, P], padded on the right with tokens; lengths: those of the B prompts."""
        first, texts = self.after_prefill(), self._texts
        if texts is None:
            return first.choose(logits, watch)
        texts.start(prompts, lengths)
        tokens = first.choose(first._penalized(logits[:, None], Nodes.roots(logits))[:, 0], watch)
        texts.append(tokens[:, None], first.settings.positions, torch.ones_like(tokens))
        return tokens

    def append(self, tokens: Tensor, counts: Tensor) -> None:
        """Add the first counts[b] of tokens, LongTensor [B, T], after the roots to the texts that penalties read."""
        if (texts := self._texts) is not None:
            texts.append(tokens, self.settings.positions, counts)

    def penalized(self, logits: Tensor, proposal: "Proposal") -> Tensor:
        """The target's logits [B, N, V] after the penalties; every node sees its row's text and its own ancestors."""
        return logits if self._texts is None else self._penalized(logits, Nodes.read(proposal))

    def draft_terms(self, vocab: int, ids: Tensor | None = None) -> RowTerms | None:
        """What penalties do to a draft's logits in a round; None for nothing. Drafts see the text up to the root. ids:
        LongTensor [B, C], the token of each column of the logits; None if columns are tokens."""
        if (texts := self._texts) is None or self.kind.penalties is None:
            return None
        return RowTerms.of_draft(texts, self.kind.penalties, self.settings.positions, vocab, ids)

    def _penalized(self, logits: Tensor, nodes: Nodes) -> Tensor:
        assert self._texts is not None and self.kind.penalties is not None
        return penalize(self._texts, self.kind.penalties, self.settings.positions, logits, nodes)

    @property
    def _texts(self) -> PenaltyRows | None:
        return None if self.kind.penalties is None else self.settings.penalties

    @property
    def temperature(self) -> Tensor | None:
        """The temperature of each row, fp64 [B]; None is 1."""
        return None if self.greedy else self.settings["temperature"]

    def warped(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits [B, ..., V] after the filters (-inf where left out; NaN and infinity stay), and the temperature, [B],
        which kernels still have to apply where there are no filters."""
        if not self.kind.filters:
            return logits, self.temperature
        scaled = over_temperature(logits, self.settings["temperature"])
        values = {name: per_row(self.settings[name], logits) for name in self.kind.filters}
        return keep_likely(scaled, values, self.kind.largest_k), None

    def probabilities(self, logits: Tensor, watch: Watch | None = None) -> Tensor:
        """Probabilities [B, ..., V], fp32 or wider, of the distribution; logits [B, ..., V]."""
        warped, temperature = self.warped(logits)
        if self.kind.rows == "mixed" and not self.drafts:
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
        step: number of the draw within the round; draws of one number are equal."""
        # Not torch.multinomial, which waits for the device and draws its noise in fp32 (see `exponentials`).
        return self.backend.first_arrival(weights, self.exponentials(weights, step))

    def uniforms(self, like: Tensor) -> Tensor:
        """Independent uniform numbers in [0, 1), fp64, with the shape of `like`, [B, ...]."""
        # fp32 uniforms are multiples of 6e-8, too coarse for improbable tokens of a large vocabulary.
        settings, stream = self.settings, self._stream(0, 0)
        return self.backend.row_noise(settings["seed"], settings.positions, stream, like.shape[1:])

    def exponentials(self, like: Tensor, step: int = 0, first: int = 0, stride: int | None = None) -> Tensor:
        """Independent exponential numbers of rate 1, fp64, like `like`, [B, ...]. Constant in greedy rows, which thus
        draw the most probable token. first, stride: as in `Backend.row_noise`."""
        # CUDA's fp32 exponentials are never below 6e-8, so `draw` could not draw tokens of that probability.
        settings, stream = self.settings, self._stream(1, step)
        numbers = settings["seed"], settings.positions, stream, like.shape[1:], settings.greedy, first, stride
        return self.backend.row_noise(*numbers)

    def exponentials_by_part(self, like: Tensor, widths: Sequence[int], stride: int) -> list[Tensor]:
        """`exponentials` for like [B, N, C], split along N into contiguous parts of `widths`. stride >= C."""
        if len(like) == 1:  # one launch draws all
            return list(self.exponentials(like, stride=stride).split(list(widths), 1))
        parts, first = [], 0
        for part in like.split(list(widths), 1):
            parts.append(self.exponentials(part, first=first, stride=stride))
            first += part.shape[1] * stride
        return parts

    def _stream(self, kind: int, step: int) -> int:
        """kind: 0 for uniform numbers, 1 for exponential ones."""
        return (2 * (not self.drafts) + kind) * MOST_DRAWS + step


def row_seeds(seed: int | Sequence[int] | None, rows: int, greedy: bool) -> list[int]:
    """The seed of each row. None draws one from torch's global generator, unless rows are greedy."""
    if isinstance(seed, Sequence):
        return list(seed)
    if seed is None:
        seed = 0 if greedy else int(torch.randint(2**63 - 1, ()))
    return [row_seed(seed, row) for row in range(rows)]


def per_row(values: Tensor, like: Tensor) -> Tensor:
    """values [B] with the dimensions of like [B, ..., V]."""
    return values.view(-1, *[1] * (like.dim() - 1))


GREEDY = Sampler()
