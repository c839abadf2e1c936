"""The sampling settings of rows, their texts and penalties, which rounds read on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

from longspec.inference.request import FILTERS, PenaltyKind, Sampling, joined_penalties
from longspec.inference.token_options import LONGEST_WORD, MOST_NGRAM, MOST_RULES
from longspec.kernels.shared.device import upload

NO_TOKEN, ANY_TOKEN = -1, -2
"""In texts: before the first token and after the last; in the contexts of rules: whatever token."""
_ALL_RULES = PenaltyKind(True, True, MOST_RULES, LONGEST_WORD - 1)
SERVED_PENALTIES = (
    PenaltyKind(True, True),
    _ALL_RULES._replace(context=0),
    *(_ALL_RULES._replace(ngram=size) for size in (4, 8, 16, MOST_NGRAM)),
)
"""The kinds of a server, each covers those before it: few, because their rounds are captured."""


def served_penalties(samplings: Sequence[Sampling]) -> PenaltyKind | None:
    """The first of SERVED_PENALTIES that covers all these settings; None if there are no penalties."""
    kind = joined_penalties(samplings)
    return kind and next(served for served in SERVED_PENALTIES if served.covers(kind))


@dataclass
class PenaltyRows:
    """Text and penalties of B rows, in tensors that are changed in place."""

    history: Tensor
    """LongTensor [B, S]: the token at each position up to the root's. The entries after it are tokens, too."""
    prompt_lengths: Tensor
    """LongTensor [B]."""
    factors: Tensor
    """fp64 [B, 3]: repetition, presence and frequency penalty."""
    ngram_sizes: Tensor
    """LongTensor [B]; 0 for none."""
    rule_tokens: Tensor
    """LongTensor [B, R]."""
    rule_biases: Tensor
    """fp32 [B, R]; 0 for rules that do not exist."""
    rule_ends: Tensor
    """LongTensor [B, R]: `Rule.until`."""
    rule_contexts: Tensor
    """LongTensor [B, R, C]: `Rule.after` from its last token on, padded with ANY_TOKEN."""

    @classmethod
    def allocate(cls, rows: int, capacity: int, kind: PenaltyKind, device: torch.device) -> "PenaltyRows":
        """Rows without penalties. capacity: positions per row, S; kind: gives R and C."""

        def zeros(*shape: int, dtype: torch.dtype = torch.long) -> Tensor:
            return torch.zeros(rows, *shape, dtype=dtype, device=device)

        rules = kind.rules
        texts = zeros(capacity), zeros(), zeros(3, dtype=torch.float64), zeros()
        allocated = cls(
            *texts, zeros(rules), zeros(rules, dtype=torch.float32), zeros(rules), zeros(rules, kind.context)
        )
        allocated.assign(slice(0, rows), [Sampling()] * rows)
        return allocated

    @property
    def tensors(self) -> list[Tensor]:
        return [getattr(self, field.name) for field in fields(self)]

    def narrow(self, rows: slice) -> "PenaltyRows":
        """The consecutive `rows`, in the same tensors."""
        return PenaltyRows(*(values[rows] for values in self.tensors))

    def assign(self, rows: slice | Tensor, samplings: Sequence[Sampling]) -> None:
        """Set the penalties of some rows."""
        count, (most, width) = len(samplings), self.rule_contexts.shape[1:]
        tokens, ends = torch.zeros(2, count, most, dtype=torch.long)
        biases = torch.zeros(count, most)
        contexts = torch.full((count, most, width), ANY_TOKEN)
        for row, rules in enumerate(sampling.rules for sampling in samplings):
            used = slice(len(rules))
            tokens[row, used] = torch.tensor([rule.token for rule in rules], dtype=torch.long)
            biases[row, used] = torch.tensor([rule.bias for rule in rules])
            ends[row, used] = torch.tensor([rule.until for rule in rules], dtype=torch.long)
            padded = [[*rule.after[::-1], *[ANY_TOKEN] * (width - len(rule.after))] for rule in rules]
            contexts[row, used] = torch.tensor(padded, dtype=torch.long).view(len(rules), width)
        factors = [[s.repetition_penalty, s.presence_penalty, s.frequency_penalty] for s in samplings]
        sizes = [sampling.no_repeat_ngram_size for sampling in samplings]
        settings = torch.tensor(factors, dtype=torch.float64), torch.tensor(sizes), tokens, biases, ends, contexts
        for own, values in zip(self.tensors[2:], settings, strict=True):
            own[rows] = upload(values, own.device)

    def start(self, prompts: Tensor, lengths: Sequence[int]) -> None:
        """Begin texts with prompts, LongTensor [B, P], padded on the right with tokens; lengths: B numbers."""
        self.history[:, : prompts.shape[1]] = prompts
        self.prompt_lengths.copy_(upload(torch.tensor(lengths), self.prompt_lengths.device))

    def append(self, tokens: Tensor, positions: Tensor, counts: Tensor) -> None:
        """Add the first counts[b] of tokens, LongTensor [B, T], after the roots at `positions`, int [B]."""
        steps = torch.arange(tokens.shape[1], device=tokens.device)
        places = (positions.long()[:, None] + 1 + steps).clamp(max=self.history.shape[1] - 1)
        kept = self.history.gather(1, places)
        self.history.scatter_(1, places, torch.where(steps < counts[:, None], tokens, kept))


FIELDS = ("seed", "top_k", "temperature", *(name for name in FILTERS if name != "top_k"))
"""The settings of a row that are numbers: two integers, then fractions."""


@dataclass(eq=False)
class RowSettings:
    """Settings of B rows, in tensors that change in place. Greedy rows draft at temperature 1 and keep all tokens."""

    numbers: Tensor
    """int64 [FIELDS, B]: integers, and the bits of fractions in fp64."""
    greedy: Tensor
    """bool [B]."""
    positions: Tensor
    """int32 [B]: the root's position. A cache has this tensor as the number of its accepted tokens."""
    penalties: "PenaltyRows | None" = None
    """None as long as no row has any."""

    @classmethod
    def allocate(
        cls, rows: int, device: torch.device, penalties: PenaltyKind | None = None, capacity: int = 0
    ) -> "RowSettings":
        """Greedy rows. penalties: those that the rows can have, in texts of up to `capacity` tokens."""
        numbers = torch.zeros(len(FIELDS), rows, dtype=torch.long, device=device)
        positions = torch.zeros(rows, dtype=torch.int32, device=device)
        settings = cls(numbers, torch.ones(rows, dtype=torch.bool, device=device), positions)
        if penalties is not None:
            settings.penalties = PenaltyRows.allocate(rows, capacity, penalties, device)
        settings.assign(slice(0, rows), [Sampling()] * rows, [0] * rows)
        return settings

    def narrow(self, rows: slice) -> "RowSettings":
        penalties = None if self.penalties is None else self.penalties.narrow(rows)
        return RowSettings(self.numbers[:, rows], self.greedy[rows], self.positions[rows], penalties)

    def __getitem__(self, name: str) -> Tensor:
        """One of FIELDS, [B]: int64 for the first two, fp64 for the others. A top_k can exceed the vocabulary."""
        index = FIELDS.index(name)
        return self.numbers[index] if index < 2 else self.numbers[index].view(torch.float64)

    def assign(self, rows: slice | Tensor, samplings: Sequence[Sampling], seeds: Sequence[int]) -> None:
        """Set the settings of some rows, without waiting for the device. seeds: replace those of `samplings`."""
        settings = [Sampling(temperature=1.0) if sampling.greedy else sampling for sampling in samplings]
        integers = [[seed - (seed >> 63 << 64) for seed in seeds], [s.top_k or 2**31 for s in settings]]
        fractions = [[getattr(sampling, name) for sampling in settings] for name in FIELDS[2:]]
        packed = torch.cat([torch.tensor(integers), torch.tensor(fractions, dtype=torch.float64).view(torch.long)])
        device = self.numbers.device
        self.numbers[:, rows] = upload(packed, device)
        self.greedy[rows] = upload(torch.tensor([sampling.greedy for sampling in samplings]), device)
        if self.penalties is not None:
            self.penalties.assign(rows, samplings)
