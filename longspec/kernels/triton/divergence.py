"""The terms of the training loss and its gradient, in two passes over the logits without intermediate arrays.

Plain torch writes a dozen arrays of [tokens, vocabulary] in fp32. These kernels read the logits twice and write the
gradient over the draft's. Arithmetic is in fp32. T is the number of tokens.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.torch.vocabulary import OUTSIDE

BLOCK = 4096
"""Columns per step of the loop."""
_OUTSIDE = tl.constexpr(OUTSIDE)


# With q = softmax of the draft's logits, p = softmax of the teacher's and y the label:
#   terms = (-log q(y), KL(p || q) = sum p * (log p - log q), -log p(y))
#   gradient = q - (1 - share) * onehot(y) - share * p, the derivative of (1 - share) * terms[0] + share * terms[1]
# where log q = logits - norm and log p = teacher - teacher_norm. One program takes one token. A token with the label
# OUTSIDE has no cross-entropy: its gradient is share * (q - p).
@triton.jit
def _terms_kernel(
    logits_ptr,
    teacher_ptr,
    labels_ptr,
    norm_ptr,
    teacher_norm_ptr,
    terms_ptr,
    vocab,
    share,
    TEACHER: tl.constexpr,
    DISTILL: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * vocab
    label = tl.load(labels_ptr + row)
    norm = tl.load(norm_ptr + row)
    q_weight = tl.where(label == _OUTSIDE, share, 1.0)
    # log q and log p need the log-sum-exp of the whole vocabulary, which a first pass (over all ranks) has computed.
    if TEACHER:
        teacher_ptr += row * vocab
        teacher_norm = tl.load(teacher_norm_ptr + row)
        in_part = (label >= 0) & (label < vocab)
        label_logit = tl.load(teacher_ptr + label, mask=in_part).to(tl.float32)
        tl.store(terms_ptr + row * 3 + 2, tl.where(in_part, teacher_norm - label_logit, 0.0))

    column = tl.arange(0, BLOCK)
    ce = tl.zeros([BLOCK], tl.float32)
    kl = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        token = start + column
        inside = token < vocab
        log_q = tl.load(logits_ptr + token, mask=inside, other=float("-inf")).to(tl.float32) - norm
        gradient = q_weight * tl.exp(log_q)
        is_label = (token == label) & inside
        ce -= tl.where(is_label, log_q, 0.0)
        gradient -= tl.where(is_label, 1.0 - share, 0.0)
        if DISTILL:
            log_p = tl.load(teacher_ptr + token, mask=inside, other=float("-inf")).to(tl.float32) - teacher_norm
            p = tl.exp(log_p)
            # A token that is impossible for both would add 0 * (-inf - -inf).
            kl += tl.where(p == 0.0, 0.0, p * (log_p - log_q))
            gradient -= share * p
        # These columns are not read again, so the gradient may replace them.
        tl.store(logits_ptr + token, gradient, mask=inside)

    tl.store(terms_ptr + row * 3, tl.sum(ce, 0))
    tl.store(terms_ptr + row * 3 + 1, tl.sum(kl, 0))


def terms_and_gradient(
    logits: Tensor, teacher: Tensor | None, labels: Tensor, share: float, norm: Tensor, teacher_norm: Tensor | None
) -> Tensor:
    """See `Backend.terms_and_gradient`."""
    terms = torch.zeros(len(logits), 3, dtype=torch.float32, device=logits.device)
    if len(logits):
        _terms_kernel[(len(logits),)](
            *(logits, logits if teacher is None else teacher, labels),
            *(norm, norm if teacher_norm is None else teacher_norm, terms),
            *(logits.shape[1], share),
            TEACHER=teacher is not None,
            DISTILL=teacher is not None and share > 0,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return terms
