"""The training losses. None of them holds logits of shape [tokens, vocabulary].

If several ranks share a target, each holds the logits of its own part of the vocabulary. The ranks exchange a few
numbers per token, the sums of the loss and the gradient of the hidden states, but no logits.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspec.data.collators import IGNORED
from longspec.kernels.shared.device import upload
from longspec.kernels.torch.vocabulary import OUTSIDE
from longspec.models.parallel import first_token, vocabulary_size
from longspec.ranks.agreement import fail_together, from_every_rank
from longspec.train.chunked_loss import TERMS, ChunkedLoss, score_chunks
from longspec.train.losses import LOSSES

CHUNK_LOGITS = 2**27
"""Logits of the draft per chunk, counted over all ranks that share a target: 1024 tokens of a 128k vocabulary or 8192
of a 16k one, 0.25 GiB in bf16."""


@dataclass(frozen=True)
class DraftLoss:
    """A training loss: (draft hidden, target hidden [B, T, hidden], labels [B, T], lm_head) -> (sum, metrics).

    `ce` is the cross-entropy with the next token, `distill` the KL divergence from the target's distribution to the
    draft's, `mixed` their mean. `acceptance` is -log of Σ min(p, q), the probability that speculative sampling accepts
    a token of the draft's distribution q for the target's p (arXiv 2602.23881). It runs in plain torch, and so do
    registered losses (see `register_loss`). The hidden state at i predicts labels[i + 1]; labels of -100 do not
    count. Labels are on the host, where the scored tokens can be selected without waiting for the device.

    The sum (fp32, or fp64 for fp64 input) is over tokens; the caller divides it by the number of tokens of all ranks.
    metrics holds detached sums over the same tokens: `loss`, `ce` and `kl` if they are part of the loss, and
    `target_loss`, the target's own cross-entropy, if `log_target_loss`.

    With a draft's vocabulary list, only these rows of lm_head are read. Labels outside the list add nothing to `ce`,
    and the others use the target's distribution restricted to the list and normalized. `target_loss` is that of the
    whole vocabulary in any case. A draft with a head of its own is scored with it, and the head trains.
    """

    loss: str
    """A name in `LOSSES`."""
    log_target_loss: bool = False
    """Whether metrics include the target's own cross-entropy."""
    chunk_logits: int = CHUNK_LOGITS
    """Largest number of logits in a chunk."""
    vocabulary: Tensor | None = None
    """The draft's vocabulary list, LongTensor [Vd], ascending; None for the whole vocabulary."""

    @property
    def reads_target(self) -> bool:
        """Whether the target's hidden states are needed. Otherwise they may be None."""
        return LOSSES[self.loss].teacher_share > 0 or self.log_target_loss

    def __call__(
        self,
        hidden: Tensor,
        target_hidden: Tensor | None,
        labels: Tensor,
        lm_head: nn.Module,
        head: nn.Module | None = None,
        *,
        compute: Callable[..., tuple[Tensor, Tensor]] = ChunkedLoss.apply,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """head: the draft's own. compute: its first result is returned; `scores` passes `score_chunks`."""
        student, teacher, targets = self._select_scored(hidden, target_hidden, labels)
        size = vocabulary_size(lm_head) if self.vocabulary is None else len(self.vocabulary)
        # The same number of tokens on all ranks.
        chunk = max(1, self.chunk_logits // size)
        with gathered_weight(lm_head) as weight:
            rows, row_labels = self._draft_head(lm_head, weight, targets)
            own: Any = rows if head is None else head.weight
            result, sums = compute(student, teacher, row_labels, own, rows, self.loss, chunk)
            self._restore_target_loss(sums, teacher, targets, lm_head, weight)
        share = LOSSES[self.loss].teacher_share
        reported = (True, share < 1, share > 0, self.log_target_loss)
        return result, {name: value for name, value, shown in zip(TERMS, sums, reported, strict=True) if shown}

    @torch.no_grad()
    def scores(
        self, hidden: Tensor, target_hidden: Tensor | None, labels: Tensor, *heads: Any
    ) -> tuple[dict[str, Tensor], Tensor]:
        """The objective of an evaluation: the metrics without gradients, and bool [B, T]: whether the draft ranks the
        label at [b, t] first.

        The flags are False for labels that do not count. They are on the same device as `labels`.
        """
        correct, metrics = self(hidden, target_hidden, labels, *heads, compute=score_chunks)
        # The first column has no hidden state before it.
        scored = labels != IGNORED
        scored[:, 0] = False
        return metrics, scored.masked_scatter(scored, correct.to(scored.device))

    def _select_scored(
        self, hidden: Tensor, target_hidden: Tensor | None, labels: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The tokens that count, N in all: draft and target hidden states [N, hidden] and the next tokens [N]."""
        # Hidden state i predicts the token at i + 1, so labels move one to the left.
        next_tokens = F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
        indices = (next_tokens != IGNORED).nonzero().squeeze(1)
        # Selected on the host: on the device, the number of tokens would have to be copied back.
        targets = upload(next_tokens[indices], hidden.device)
        indices = upload(indices, hidden.device)

        student = hidden.flatten(0, 1).index_select(0, indices)
        teacher = None
        if self.reads_target:
            assert target_hidden is not None
            teacher = target_hidden.flatten(0, 1).index_select(0, indices)
        return student, teacher, targets

    def _draft_head(self, lm_head: nn.Module, weight: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """This rank's rows of the draft's head, and the labels [N] as numbers of these rows.

        Labels of rows on other ranks are out of range, those of tokens that the draft does not propose are OUTSIDE.
        """
        first = first_token(lm_head)
        if self.vocabulary is None:
            return weight, targets - first
        tokens = self.vocabulary.to(targets.device)
        # The list is ascending, so this rank's part of it is a slice.
        start, end = 0, len(tokens)
        if len(weight) < vocabulary_size(lm_head):
            start, end = (int((tokens < token).sum()) for token in (first, first + len(weight)))
        number = torch.searchsorted(tokens, targets)
        is_listed = tokens[number.clamp(max=len(tokens) - 1)] == targets
        return weight[tokens[start:end] - first], torch.where(is_listed, number - start, OUTSIDE)

    def _restore_target_loss(
        self, sums: Tensor, teacher: Tensor | None, targets: Tensor, lm_head: nn.Module, weight: Tensor
    ) -> None:
        """Write the target's cross-entropy over the whole vocabulary to `sums`, if it was computed over a list."""
        if self.vocabulary is None or not self.log_target_loss:
            return
        assert teacher is not None
        chunk = max(1, self.chunk_logits // vocabulary_size(lm_head))
        _, whole = score_chunks(teacher, None, targets - first_token(lm_head), weight, weight, "ce", chunk)
        sums[TERMS.index("target_loss")] = whole[TERMS.index("ce")]


@contextmanager
def gathered_weight(lm_head: nn.Module) -> Iterator[Tensor]:
    """The head's whole weight [V, hidden]. Under ZeRO-3 each rank holds only a part of it.

    The weight is gathered once for all chunks. Ranks differ in their number of tokens and hence of chunks, so a gather
    per chunk would be a collective that some ranks never join.
    """
    # Reading the attribute `lm_head.weight` would make DeepSpeed keep it gathered until the end of backward.
    (weight,) = lm_head.parameters()
    with deepspeed.zero.GatheredParameters(weight):
        yield weight


def stop_at_broken_loss(
    step: int, loss: float, norm: float, losses: Sequence[Tensor], samples: Sequence[Sequence[str]]
) -> None:
    """Stop all ranks with an error that lists the samples of the micro-batches with a NaN or infinite loss.

    If only the gradient is not finite, all samples of the step are listed. losses, samples: the loss and the sample ids
    of each micro-batch of this rank.
    """
    own = [(ids, math.isfinite(micro_loss)) for ids, micro_loss in zip(samples, losses, strict=True)]
    reports = list(chain.from_iterable(from_every_rank(own)))
    broken = [ids for ids, is_finite in reports if not is_finite] or [ids for ids, _ in reports]
    names = ", ".join(dict.fromkeys(chain.from_iterable(broken)))
    fail_together(
        f"step {step}: the loss is {loss} and the gradient norm {norm}; training stops without saving this step. "
        f"Samples: {names}"
    )
