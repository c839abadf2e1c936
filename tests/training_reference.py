"""Plain torch references of training's attention and of the loss kernels, with their signatures."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from attention_reference import attention_with_lse
from torch import Tensor

from longspec.kernels.backend import OUTSIDE
from longspec.kernels.training.segments import BLOCK, Segments


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float, window: int | None = None
) -> Tensor:
    """Reference of `PaddedAttention.varlen`: dense attention under a mask [N, N]."""
    return dense_attention(q, k, v, causal_mask(segments, window), scale)


def block_attention(q: Tensor, k: Tensor, v: Tensor, segments: Segments, scale: float) -> Tensor:
    """Reference of `PaddedAttention.block`: dense attention under a mask [N, N]."""
    return dense_attention(q, k, v, block_mask(segments), scale)


def dense_attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Dense attention [N, H, D] of flattened tokens; q [N, H, D]; k, v [M, K, D]; mask bool [N, M]."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    return attention_with_lse(q, k, v, mask[None], scale)[0][0].transpose(0, 1)


def causal_mask(segments: Segments, window: int | None = None) -> Tensor:
    """bool [N, N]: query i sees key j of its segment if i - window <= j <= i - lag, in offsets."""
    offsets, number = _offsets(segments)
    lag = torch.tensor(segments.lags, device=segments.device)[number][:, None]
    distance = offsets[:, None] - offsets[None]
    # Both conditions: the same segment, and far enough back.
    visible = (number[:, None] == number[None]) & (distance >= lag)
    return visible if window is None else visible & (distance <= window)


def block_mask(segments: Segments) -> Tensor:
    """bool [N, N]: query i sees key j of its segment if j // BLOCK < i // BLOCK, in offsets."""
    offsets, number = _offsets(segments)
    earlier = offsets[None] // BLOCK < offsets[:, None] // BLOCK
    return (number[:, None] == number[None]) & earlier


def _offsets(segments: Segments) -> tuple[Tensor, Tensor]:
    """Offset of each token in its segment and the number of its segment, both LongTensor [N]."""
    lengths = torch.tensor(segments.lengths)
    offsets = torch.cat([torch.arange(length) for length in segments.lengths])
    number = torch.arange(len(lengths)).repeat_interleave(lengths)
    return offsets.to(segments.device), number.to(segments.device)


def terms_and_gradient(
    logits: Tensor, teacher: Tensor | None, labels: Tensor, share: float, norm: Tensor, teacher_norm: Tensor | None
) -> Tensor:
    """Reference of `divergence.terms_and_gradient`, in fp32 or wider."""
    wide = torch.promote_types(logits.dtype, torch.float32)
    # One-hot labels; a label outside of this part of the vocabulary has no 1.
    onehot = (torch.arange(logits.shape[1], device=logits.device) == labels[:, None]).to(wide)
    log_q = logits.to(wide) - norm[:, None]
    weight = torch.where(labels == OUTSIDE, share, 1.0).to(wide)[:, None]
    gradient = weight * log_q.exp() - (1 - share) * onehot

    terms = log_q.new_zeros(len(logits), 3)
    terms[:, 0] = -_sum_where(onehot, log_q)
    if teacher is not None and teacher_norm is not None:
        log_p = teacher.to(wide) - teacher_norm[:, None]
        terms[:, 2] = -_sum_where(onehot, log_p)
        if share > 0:
            p = log_p.exp()
            terms[:, 1] = _sum_where(p, log_p - log_q)
            gradient -= share * p

    logits.copy_(gradient)
    return terms


def _sum_where(weights: Tensor, values: Tensor) -> Tensor:
    """Sum of weights * values over the last dimension, where 0 * -inf counts as 0."""
    return torch.where(weights == 0, 0.0, weights * values).sum(-1)


def plain_loss(
    loss: str, hidden: Tensor, target_hidden: Tensor | None, labels: Tensor, head: Callable[[Tensor], Tensor]
) -> Tensor:
    """Reference of `DraftLoss`: the sum over tokens, from all logits. The hidden state at i predicts label i + 1.

    target_hidden: None for the loss `ce`.
    """
    logits, targets = head(hidden[:, :-1]).flatten(0, 1), labels[:, 1:].flatten()
    ce = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
    if target_hidden is None:
        return ce
    scored = targets != -100
    logits, teacher = logits[scored], head(target_hidden[:, :-1]).flatten(0, 1)[scored]
    kl = F.kl_div(logits.log_softmax(-1), teacher.log_softmax(-1), reduction="sum", log_target=True)
    accepted = torch.minimum(logits.softmax(-1), teacher.softmax(-1)).sum(-1)
    return {"ce": ce, "distill": kl, "mixed": (ce + kl) / 2, "acceptance": -accepted.log().sum()}[loss]
