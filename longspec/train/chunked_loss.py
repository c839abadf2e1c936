"""The losses chunk by chunk of tokens, and their gradient, from logits of one chunk at a time."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from longspec.data.collators import IGNORED
from longspec.errors import UserError
from longspec.kernels.backend import Backend
from longspec.kernels.choice import backend_of
from longspec.models.parallel import log_sum_exp_over_ranks, max_over_ranks, sum_over_ranks
from longspec.train.losses import LOSSES, TokenLoss

TERMS = ("loss", "ce", "kl", "target_loss")
"""Names of the summed terms, in their order in a tensor of sums."""
LEAST_ACCEPTANCE = 1e-6
"""Lower bound on the probability of acceptance, so that the loss stays finite for disjoint distributions."""


def logit_chunks(
    hidden: Tensor, teacher: Tensor | None, weight: Tensor, teacher_weight: Tensor, chunk: int
) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
    """Slices of `chunk` tokens, each with the draft's and the target's logits [chunk, V]."""
    for start in range(0, len(hidden), chunk):
        span = slice(start, start + chunk)
        logits = hidden[span] @ weight.T
        teacher_logits = None if teacher is None else teacher[span] @ teacher_weight.T
        yield span, logits, teacher_logits


def zero_sums(hidden: Tensor) -> Tensor:
    """Zeros [4] for the sums of TERMS, fp32 or fp64."""
    return hidden.new_zeros(len(TERMS), dtype=torch.promote_types(hidden.dtype, torch.float32))


class ChunkedLoss(torch.autograd.Function):
    """The loss summed over tokens. Forward also computes the gradient, chunk by chunk, from the same logits.

    Only the gradient of the hidden states [N, hidden] is kept for backward, and that of the head if it trains. This
    saves a second pass over the vocabulary, and the head's weight is not needed after forward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        teacher: Tensor | None,
        labels: Tensor,
        weight: Tensor,
        teacher_weight: Tensor,
        loss: str,
        chunk: int,
    ) -> tuple[Tensor, Tensor]:
        """hidden, teacher [N, hidden]; labels [N]; weights [V, hidden] -> (sum of the loss, sums of TERMS [4]).

        weight, teacher_weight: heads of draft and target, which are the same unless the draft has its own. V is the
        size of this rank's part of the vocabulary and labels are relative to its first token. A label is in 0 … V - 1
        on exactly one of the ranks that share a target.
        """
        gradient = torch.empty_like(hidden)
        head_gradient = torch.zeros_like(weight) if ctx.needs_input_grad[3] else None
        sums = zero_sums(hidden)
        for span, logits, teacher_logits in logit_chunks(hidden, teacher, weight, teacher_weight, chunk):
            # Chunk by chunk, because logits of 16k tokens and 128k entries take 4 GiB in bf16.
            logits_gradient = chunk_terms(logits, teacher_logits, labels[span], sums, loss)
            logits_gradient = logits_gradient.to(hidden.dtype)
            torch.mm(logits_gradient, weight, out=gradient[span])
            if head_gradient is not None:
                head_gradient.addmm_(logits_gradient.T, hidden[span])

        # Ranks that share a target each have the terms of their part of the vocabulary.
        sum_over_ranks(sums)
        sum_over_ranks(gradient)
        ctx.save_for_backward(gradient, head_gradient)
        ctx.mark_non_differentiable(sums)
        return sums[0].clone(), sums

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        gradient, head_gradient = ctx.saved_tensors
        own = None if head_gradient is None else head_gradient * upstream
        return gradient * upstream, None, None, own, None, None, None


def score_chunks(
    hidden: Tensor,
    teacher: Tensor | None,
    labels: Tensor,
    weight: Tensor,
    teacher_weight: Tensor,
    loss: str,
    chunk: int,
) -> tuple[Tensor, Tensor]:
    """Whether each label is ranked first, bool [N], and the sums of TERMS [4]. Arguments as of ChunkedLoss."""
    sums, correct = zero_sums(hidden), torch.empty_like(labels, dtype=torch.bool)
    for span, logits, teacher_logits in logit_chunks(hidden, teacher, weight, teacher_weight, chunk):
        correct[span] = ranked_first(logits, labels[span])
        chunk_terms(logits, teacher_logits, labels[span], sums, loss)
    return correct, sum_over_ranks(sums)


def ranked_first(logits: Tensor, labels: Tensor) -> Tensor:
    """Whether each label has the largest of all logits, bool [N]. logits: [N, V], a rank's part of the vocabulary."""
    on_this_rank = (labels >= 0) & (labels < logits.shape[1])
    label_logits = logits.gather(1, labels.clamp(0, logits.shape[1] - 1)[:, None])[:, 0]
    # The label's logit is on one rank only, the largest logit may be on another.
    largest = max_over_ranks(logits.amax(-1))
    return sum_over_ranks((on_this_rank & (label_logits == largest)).int()) > 0


def chunk_terms(logits: Tensor, teacher_logits: Tensor | None, labels: Tensor, sums: Tensor, loss_name: str) -> Tensor:
    """Add this rank's part of a chunk's TERMS to `sums` in place, and return the loss's gradient by `logits` [N, V].

    With the draft's distribution q, the target's p, the label y and share = `teacher_share`:

        loss = (1 - share) · -log q(y) + share · KL(p ‖ q)
        d loss / d logits = q - (1 - share) · onehot(y) - share · p

    For the label OUTSIDE, only share · KL and its gradient remain. The loss `acceptance` is that of
    `_acceptance_terms`, and a registered one that of `_own_terms`.

    Overwrites `logits`.
    """
    share, per_token = LOSSES[loss_name].teacher_share, LOSSES[loss_name].per_token
    if per_token is not None or loss_name == "acceptance":
        if per_token is not None:
            loss, terms, gradient = _own_terms(per_token, logits, teacher_logits, labels, share)
        else:
            assert teacher_logits is not None
            loss, terms, gradient = _acceptance_terms(logits, teacher_logits, labels)
        sums += torch.cat([loss.sum()[None], terms.sum(0)]).to(sums.dtype)
        return gradient
    norm, teacher_norm = _norm(logits), None if teacher_logits is None else _norm(teacher_logits)
    backend = backend_of(logits.device, logits.dtype)
    terms = backend.terms_and_gradient(logits, teacher_logits, labels, share, norm, teacher_norm)
    ce, kl, target_ce = terms.sum(0).to(sums.dtype)
    sums += torch.stack([(1 - share) * ce + share * kl, ce, kl, target_ce])
    return logits


def _norm(logits: Tensor) -> Tensor:
    """Log-sum-exp [N] over the whole vocabulary, in fp32 or wider, of this rank's part [N, V]."""
    return log_sum_exp_over_ranks(backend_of(logits.device, logits.dtype).log_sum_exp(logits))


def _own_terms(
    per_token: TokenLoss, logits: Tensor, teacher_logits: Tensor | None, labels: Tensor, share: float
) -> tuple[Tensor, Tensor, Tensor]:
    """A registered loss per token [N], its `terms_and_gradient`, and the gradient by autograd."""
    norm, teacher_norm = _norm(logits), None if teacher_logits is None else _norm(teacher_logits)
    overwritten = logits.to(norm.dtype, copy=True)
    terms = Backend.terms_and_gradient(overwritten, teacher_logits, labels, share, norm, teacher_norm)
    shown = teacher_logits.to(terms.dtype) if share and teacher_logits is not None else None
    labels = labels.masked_fill((labels < 0) | (labels >= logits.shape[1]), IGNORED)
    with torch.enable_grad():
        variable = logits.to(terms.dtype).detach().requires_grad_()
        loss = per_token(variable, shown, labels)
        if loss.shape != labels.shape:
            raise UserError(
                f"config key loss: the registered loss returned {list(loss.shape)} for {len(labels)} tokens; it must "
                "return one value per token"
            )
        (gradient,) = torch.autograd.grad(loss.sum(), variable)
    return loss.detach(), terms, gradient


def _acceptance_terms(logits: Tensor, teacher_logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """This rank's part [N] of the loss -log a with a = Σ min(p, q), its `terms_and_gradient`, and the gradient:

    d loss / d logits = q / a · (m - [q < p]),    m = Σ q over the tokens with q < p
    """
    norm = _norm(logits)
    q = (logits.to(norm.dtype) - norm[:, None]).exp_()
    difference = logits.to(norm.dtype, copy=True)
    # The gradient of KL is q - p.
    terms = Backend.terms_and_gradient(difference, teacher_logits, labels, 1.0, norm, _norm(teacher_logits))
    is_below = difference < 0
    part = (q - difference.clamp_(min=0)).sum(1)
    accepted = sum_over_ranks(part.clone()).clamp_(min=LEAST_ACCEPTANCE)
    mass_below = sum_over_ranks((q * is_below).sum(1))
    # Each rank counts the loss in proportion to its part of the sum.
    loss = -accepted.log() * part / accepted
    gradient = q.div_(accepted[:, None]).mul_(mass_below[:, None] - is_below.to(q.dtype))
    return loss, terms, gradient
