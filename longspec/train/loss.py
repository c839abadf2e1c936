"""The training objectives. None of them ever holds [tokens, vocabulary] logits.

Where several ranks share a target, each has the logits of its own part of the vocabulary: the ranks exchange one
log-sum-exp a token, then sums of the loss and of the hidden states' gradient, and no logits.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from typing import Any

import deepspeed
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from longspec.data.collators import IGNORED
from longspec.errors import UserError
from longspec.kernels.shared.device import runs_triton, upload
from longspec.models.parallel import (
    first_token,
    log_sum_exp_over_ranks,
    max_over_ranks,
    sum_over_ranks,
    vocabulary_log_softmax,
    vocabulary_size,
)
from longspec.train.distributed import from_every_rank, from_rank_zero

LOSSES = ("ce", "distill", "mixed")
TEACHER_SHARE = {"ce": 0.0, "distill": 1.0, "mixed": 0.5}
"""How much of the token to be predicted comes from the target's distribution; the rest is the label's."""
CHUNK_LOGITS = 2**27
"""Logits of the draft that exist at a time, on all ranks that share a target: those of 1024 tokens of 128k, or of 8192
of 16k; 0.25 GiB in bf16."""
TERMS = ("loss", "ce", "kl", "target_loss")


@dataclass(frozen=True)
class Objective:
    """The objective (draft hidden, target hidden [B, T, hidden], labels [B, T], lm_head) -> (summed loss, metrics).

    Labels lie on the host, where it is known at once which tokens count.

    `ce` is the cross-entropy with the next token, `distill` the KL divergence of the draft from the target's own
    distribution, `mixed` the mean of the two. Hidden state i is scored on labels[i + 1]; labels of -100 do not count.
    The loss (fp32, or fp64 for fp64 input) is a sum over tokens, to be divided by the number of tokens of all ranks.
    metrics holds detached sums over the same tokens: `loss`, the terms `ce` and `kl` where they are in it, and
    `target_loss`, the target's own cross-entropy, if `log_target_loss`.
    """

    loss: str
    log_target_loss: bool = False
    chunk_logits: int = CHUNK_LOGITS

    @property
    def share(self) -> float:
        return TEACHER_SHARE[self.loss]

    @property
    def reads_target(self) -> bool:
        """Whether the target's hidden states are read; else they may be None."""
        return self.share > 0 or self.log_target_loss

    def __call__(
        self, hidden: Tensor, target_hidden: Tensor | None, labels: Tensor, lm_head: nn.Module
    ) -> tuple[Tensor, dict[str, Tensor]]:
        student, teacher, wanted = self._scored(hidden, target_hidden, labels)
        wanted = wanted - first_token(lm_head)
        with gathered(lm_head) as weight:
            total, sums = ChunkedLoss.apply(student, teacher, wanted, weight, self.share, self._chunk(lm_head))
        return total, self._named(sums)

    @torch.no_grad()
    def score(
        self, hidden: Tensor, target_hidden: Tensor | None, labels: Tensor, lm_head: nn.Module
    ) -> tuple[dict[str, Tensor], Tensor]:
        """metrics as above, and bool [B, T], where labels lie: which one counts and is the draft's likeliest token."""
        student, teacher, wanted = self._scored(hidden, target_hidden, labels)
        wanted = wanted - first_token(lm_head)
        sums, right = _no_sums(student), torch.empty_like(wanted, dtype=torch.bool)
        with gathered(lm_head) as weight:
            for span, logits, teacher_logits in _chunks(student, teacher, weight, self._chunk(lm_head)):
                right[span] = _ranked_first(logits, wanted[span])
                _chunk_terms(logits, teacher_logits, wanted[span], self.share, sums)
        sum_over_ranks(sums)
        hits = labels != IGNORED
        hits[:, 0] = False
        return self._named(sums), hits.masked_scatter(hits, right.to(hits.device))

    def _scored(
        self, hidden: Tensor, target_hidden: Tensor | None, labels: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """Of the N labels that count: the draft's and target's hidden states [N, hidden] before them, and they [N]."""
        following = F.pad(labels[:, 1:], (0, 1), value=IGNORED).flatten()
        places = (following != IGNORED).nonzero().squeeze(1)
        wanted, places = (upload(x, hidden.device) for x in (following[places], places))
        student, teacher = hidden.flatten(0, 1).index_select(0, places), None
        if self.reads_target:
            assert target_hidden is not None
            teacher = target_hidden.flatten(0, 1).index_select(0, places)
        return student, teacher, wanted

    def _chunk(self, lm_head: nn.Module) -> int:
        """Tokens of a chunk, the same on all ranks."""
        return max(1, self.chunk_logits // vocabulary_size(lm_head))

    def _named(self, sums: Tensor) -> dict[str, Tensor]:
        wanted = (True, self.share < 1, self.share > 0, self.log_target_loss)
        return {name: value for name, value, shown in zip(TERMS, sums, wanted, strict=True) if shown}


@contextmanager
def gathered(lm_head: nn.Module) -> Iterator[Tensor]:
    """The head's whole weight [V, hidden], of which each rank holds a part under ZeRO-3.

    One gather for all chunks: ranks differ in their number of tokens, so a gather for each chunk would leave some of
    them waiting for one another.
    """
    (weight,) = lm_head.parameters()  # read as `lm_head.weight`, DeepSpeed would keep it gathered up to backward's end
    with deepspeed.zero.GatheredParameters(weight):
        yield weight


def _chunks(
    hidden: Tensor, teacher: Tensor | None, weight: Tensor, chunk: int
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """The draft's and the target's logits of `chunk` tokens at a time, and which tokens they are of."""
    for start in range(0, len(hidden), chunk):
        span = slice(start, start + chunk)
        yield span, hidden[span] @ weight.T, None if teacher is None else teacher[span] @ weight.T


def _no_sums(hidden: Tensor) -> Tensor:
    """Sums of TERMS to begin with, in the accuracy that `hidden` is scored in."""
    return hidden.new_zeros(len(TERMS), dtype=torch.promote_types(hidden.dtype, torch.float32))


class ChunkedLoss(torch.autograd.Function):
    """Sum of the loss over tokens; the gradient of a chunk's hidden states is taken while its logits are there.

    The head is frozen, so nothing but that gradient, [N, hidden], is kept for backward: no second pass over the
    vocabulary, and no need for the head's weight after forward.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, teacher: Tensor | None, labels: Tensor, weight: Tensor, share: float, chunk: int
    ) -> tuple[Tensor, Tensor]:
        """hidden, teacher [N, hidden]; labels [N]; weight [V, hidden] -> (sum of the loss, TERMS summed [4]).

        V is this rank's part of the vocabulary and labels count from its first token, so on one of the ranks a label
        lies in 0 … V - 1 and on the others it does not.
        """
        gradient = torch.empty_like(hidden)
        sums = _no_sums(hidden)
        for span, logits, teacher_logits in _chunks(hidden, teacher, weight, chunk):
            wrong = _chunk_terms(logits, teacher_logits, labels[span], share, sums)
            torch.mm(wrong.to(hidden.dtype), weight, out=gradient[span])
        sum_over_ranks(sums)
        sum_over_ranks(gradient)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(sums)
        return sums[0].clone(), sums

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return gradient * upstream, None, None, None, None, None


def _ranked_first(logits: Tensor, labels: Tensor) -> Tensor:
    """bool [N]: whether a label has the largest logit of all ranks' parts of the vocabulary, [N, V] each."""
    here = (labels >= 0) & (labels < logits.shape[1])
    picked = logits.gather(1, labels.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    largest = max_over_ranks(logits.amax(-1))
    return sum_over_ranks((here & (picked == largest)).int()) > 0


def _chunk_terms(logits: Tensor, teacher_logits: Tensor | None, labels: Tensor, share: float, sums: Tensor) -> Tensor:
    """Add a chunk's TERMS to `sums`, in place; return the loss's gradient with respect to `logits` [N, V].

    With q the draft's distribution, p the target's, y the label: loss = (1 - share) · -log q(y) + share · KL(p ‖ q),
    whose gradient is q - (1 - share) · onehot(y) - share · p. Of each sum over tokens this adds the V of this rank.
    The gradient may lie where the logits were.
    """
    terms, gradient = (_kernel_terms if runs_triton(logits) else _plain_terms)(logits, teacher_logits, labels, share)
    ce, kl, target_ce = terms.sum(0).to(sums.dtype)
    sums += torch.stack([(1 - share) * ce + share * kl, ce, kl, target_ce])
    return gradient


def _kernel_terms(logits: Tensor, teacher_logits: Tensor | None, labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """As `_plain_terms`; the gradient lies where the logits were."""
    from longspec.kernels.training.divergence import log_sum_exp, terms_and_gradient

    norm = log_sum_exp_over_ranks(log_sum_exp(logits))
    teacher_norm = None if teacher_logits is None else log_sum_exp_over_ranks(log_sum_exp(teacher_logits))
    return terms_and_gradient(logits, teacher_logits, labels, share, norm, teacher_norm), logits


def _plain_terms(logits: Tensor, teacher_logits: Tensor | None, labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Cross-entropy, KL and the target's own cross-entropy, [N, 3], and the loss's gradient [N, V], in fp32 or fp64."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    here = ((labels >= 0) & (labels < logits.shape[1])).to(wide)[:, None]
    picked = labels.clamp(0, logits.shape[1] - 1)[:, None]
    log_q = vocabulary_log_softmax(logits, wide)
    terms = log_q.new_zeros(len(logits), 3)
    terms[:, 0] = -(here * log_q.gather(1, picked))[:, 0]
    p = None
    if teacher_logits is not None:
        log_p = vocabulary_log_softmax(teacher_logits, wide)
        terms[:, 2] = -(here * log_p.gather(1, picked))[:, 0]
        if share:
            p = log_p.exp()
            # In place, as below: each pass over the chunk is some GB.
            terms[:, 1] = log_p.sub_(log_q).mul_(p).masked_fill_(p == 0, 0).sum(1)
    gradient = log_q.exp_()
    if p is not None:
        gradient.sub_(p, alpha=share)
    return terms, gradient.scatter_add_(1, picked, -(1 - share) * here)


def stop_at_broken_loss(
    step: int, loss: float, norm: float, losses: Sequence[Tensor], samples: Sequence[Sequence[str]]
) -> None:
    """End all ranks with a line that names the samples of the micro-batches whose loss is not finite, or all of them.

    losses, samples: of each micro-batch of this rank, its loss and the names of its samples.
    """
    broken = [batch for batch, one in zip(samples, losses, strict=True) if not math.isfinite(one)]
    found = from_every_rank((list(chain.from_iterable(broken)), list(chain.from_iterable(samples))))

    def complain() -> None:
        names = [name for mine, _ in found for name in mine] or [name for _, all_of in found for name in all_of]
        raise UserError(
            f"step {step}: the loss is {loss}, the gradient's norm {norm}; training stops and this step is not "
            f"saved. Samples: {', '.join(dict.fromkeys(names))}"
        )

    from_rank_zero(complain)
