"""The training objectives. None of them ever holds [tokens, vocabulary] logits.

Where several ranks share a target, each has the logits of its own part of the vocabulary: the ranks exchange one
log-sum-exp a token, then sums of the loss and of the hidden states' gradient, and no logits.
"""

from collections.abc import Callable
from typing import Any

import deepspeed
import torch
from torch import Tensor, nn

from longspec.data.collators import IGNORED
from longspec.models.parallel import first_token, sum_over_ranks, vocabulary_log_softmax

LOSSES = ("ce", "distill", "mixed")
TEACHER_SHARE = {"ce": 0.0, "distill": 1.0, "mixed": 0.5}
"""How much of the token to be predicted comes from the target's distribution; the rest is the label's."""
CHUNK = 1024
"""Tokens whose logits exist at a time."""

Objective = Callable[[Tensor, Tensor, Tensor, nn.Module], tuple[Tensor, dict[str, Tensor]]]


def make_objective(loss: str, log_target_loss: bool = False, chunk: int = CHUNK) -> Objective:
    """The objective (draft hidden, target hidden [B, T, hidden], labels [B, T], lm_head) -> (summed loss, metrics).

    `ce` is the cross-entropy with the next token, `distill` the KL divergence of the draft from the target's own
    distribution, `mixed` the mean of the two. Hidden state i is scored on labels[i + 1]; labels of -100 do not count.
    The loss (fp32, or fp64 for fp64 input) is a sum over tokens, to be divided by the number of tokens of all ranks.
    metrics holds detached sums over the same tokens: `loss`, the terms `ce` and `kl` where they are in it, and
    `target_loss`, the target's own cross-entropy, if `log_target_loss`.
    """
    share = TEACHER_SHARE[loss]
    names = ["loss", *(["ce"] if share < 1 else []), *(["kl"] if share else [])]
    names += ["target_loss"] if log_target_loss else []

    def objective(
        hidden: Tensor, target_hidden: Tensor, labels: Tensor, lm_head: nn.Module
    ) -> tuple[Tensor, dict[str, Tensor]]:
        kept = (labels[:, 1:] != IGNORED).flatten().nonzero().squeeze(1)
        wanted = labels[:, 1:].flatten()[kept]
        student = hidden[:, :-1].flatten(0, 1)[kept]
        teacher = target_hidden[:, :-1].flatten(0, 1)[kept] if share or log_target_loss else None
        # Under ZeRO-3 each rank holds a part of the weight. One gather for all chunks: ranks differ in their number
        # of tokens, so a gather for each chunk would leave some of them waiting for one another. (Not read as
        # `lm_head.weight`, which makes DeepSpeed keep it gathered from the start of forward to the end of backward.)
        (weight,) = lm_head.parameters()
        with deepspeed.zero.GatheredParameters(weight):
            wanted = wanted - first_token(lm_head)
            total, sums = ChunkedLoss.apply(student, teacher, wanted, weight, share, chunk)
        return total, {name: sums[TERMS.index(name)] for name in names}

    return objective


TERMS = ("loss", "ce", "kl", "target_loss")


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
        accumulate = torch.promote_types(hidden.dtype, torch.float32)
        sums = torch.zeros(len(TERMS), dtype=accumulate, device=hidden.device)
        for start in range(0, len(hidden), chunk):
            span = slice(start, start + chunk)
            teacher_logits = None if teacher is None else teacher[span] @ weight.T
            wrong = _chunk_terms(hidden[span] @ weight.T, teacher_logits, labels[span], share, sums)
            gradient[span] = wrong.to(hidden.dtype) @ weight
        sum_over_ranks(sums)
        sum_over_ranks(gradient)
        ctx.save_for_backward(gradient)
        ctx.mark_non_differentiable(sums)
        return sums[0].clone(), sums

    @staticmethod
    def backward(ctx: Any, upstream: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (gradient,) = ctx.saved_tensors
        return upstream.to(gradient.dtype) * gradient, None, None, None, None, None


def _chunk_terms(logits: Tensor, teacher_logits: Tensor | None, labels: Tensor, share: float, sums: Tensor) -> Tensor:
    """Add a chunk's TERMS to `sums`, in place; return the loss's gradient with respect to `logits` [N, V].

    With q the draft's distribution, p the target's, y the label: loss = (1 - share) · -log q(y) + share · KL(p ‖ q),
    whose gradient is q - (1 - share) · onehot(y) - share · p. Of each sum over tokens this adds the V of this rank.
    """
    here = ((labels >= 0) & (labels < logits.shape[1])).to(sums.dtype)[:, None]
    picked = labels.clamp(0, logits.shape[1] - 1)[:, None]
    log_q = vocabulary_log_softmax(logits.to(sums.dtype))
    ce, kl = -(here * log_q.gather(1, picked)).sum(), sums.new_zeros(())
    gradient = log_q.exp()
    if teacher_logits is not None:
        log_p = vocabulary_log_softmax(teacher_logits.to(sums.dtype))
        sums[3] -= (here * log_p.gather(1, picked)).sum()
        if share:
            p = log_p.exp()
            kl = (p * (log_p - log_q)).sum()
            gradient -= share * p
    gradient.scatter_add_(1, picked, -(1 - share) * here)
    sums[:3] += torch.stack([(1 - share) * ce + share * kl, ce, kl])
    return gradient
