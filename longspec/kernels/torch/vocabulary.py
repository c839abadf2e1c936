"""Operations over the vocabulary, and the terms of the training loss, in plain torch, in fp32 or wider."""

import torch
from torch import Tensor

from longspec.kernels.shared.watch import Watch

OUTSIDE = -(2**31)
"""Label of a token that is not in the draft's vocabulary. Its cross-entropy is not part of the loss."""


def over_temperature(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Logits [B, ..., V] in fp32 or wider, divided by temperature, fp64 [B]; None is 1."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature is None else wide / temperature.to(wide.dtype).view(-1, *[1] * (logits.dim() - 1))


def softmax(logits: Tensor, temperature: Tensor | None, watch: Watch | None = None) -> Tensor:
    """softmax(logits / temperature) of logits [B, ..., V], in fp32 or wider; `watch` records faulty rows.

    temperature: fp64 [B]; None is 1.
    """
    probabilities = over_temperature(logits, temperature).softmax(-1)
    if watch is not None:
        watch.record(probabilities[..., 0].isnan())  # a row that defines no distribution is NaN throughout
    return probabilities


def log_sum_exp(logits: Tensor) -> Tensor:
    """log sum exp over the last dimension of logits [..., V], in fp32 or wider."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1)


def argmax(values: Tensor, watch: Watch | None = None) -> Tensor:
    """Index of the largest of values [..., V], the first of equal ones: LongTensor [...].

    watch: records rows without a finite largest value; values are then logits [B, ..., V].
    """
    if values.is_cpu and values.dtype in (torch.float32, torch.float64):
        index = torch.from_numpy(values.numpy().argmax(-1))  # over a vocabulary, torch takes ten times as long
    else:
        index = values.max(-1).indices
    if watch is not None:
        watch.record(~values.gather(-1, index[..., None]).isfinite())
    return index


def first_arrival(weights: Tensor, noise: Tensor) -> Tensor:
    """One draw from each distribution proportional to weights [..., V]: LongTensor [...].

    noise: exponential draws of rate 1, fp64, in the shape of weights. Token x arrives at the time
    noise(x) / weights(x), and the first arrival is the draw (exponential clocks).
    """
    return argmax(weights / noise)


def terms_and_gradient(
    logits: Tensor, teacher: Tensor | None, labels: Tensor, share: float, norm: Tensor, teacher_norm: Tensor | None
) -> Tensor:
    """Loss terms of each of T tokens, [T, 3] in fp32 or wider, summed over one part of the vocabulary; overwrites
    `logits` by the gradient.

    The terms are the cross-entropy of the draft's distribution q with the label, KL(p || q) with the teacher's
    distribution p, and the cross-entropy of p with the label. The gradient is that of (1 - share) * cross-entropy +
    share * KL, or of share * KL for the label OUTSIDE.

    logits, teacher: contiguous [T, V], a part of the vocabulary each, or the whole. norm, teacher_norm: [T], their
    log-sum-exp over the whole vocabulary. labels: LongTensor [T], counted from the first token of the part; they may be
    outside of it. Without a teacher, the second and third term are 0; with share = 0, the second is 0.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    in_part = ((labels >= 0) & (labels < logits.shape[1]))[:, None]
    index = labels.clamp(0, logits.shape[1] - 1)[:, None]
    log_q = logits.to(dtype) - norm[:, None]
    terms = log_q.new_zeros(len(logits), 3)
    terms[:, 0] = -log_q.gather(1, index).masked_fill_(~in_part, 0)[:, 0]

    p = None
    if teacher is not None and teacher_norm is not None:
        log_p = teacher.to(dtype) - teacher_norm[:, None]
        terms[:, 2] = -log_p.gather(1, index).masked_fill_(~in_part, 0)[:, 0]
        if share:
            p = log_p.exp()
            # KL(p ‖ q) = Σ p · (log p - log q), where p = 0 contributes 0. In place: a chunk takes some GB.
            terms[:, 1] = log_p.sub_(log_q).mul_(p).masked_fill_(p == 0, 0).sum(1)

    gradient = log_q.exp_().mul_(torch.where(labels == OUTSIDE, share, 1.0).to(dtype)[:, None])
    if p is not None:
        gradient.sub_(p, alpha=share)
    logits.copy_(gradient.scatter_add_(1, index, -(1 - share) * in_part.to(dtype)))
    return terms
