"""A training objective's terms and gradient from logits, in two passes over them that keep nothing in between.

Plain torch writes a dozen arrays of [tokens, vocabulary] in fp32 on the way; these read the logits twice, and write the
gradient over the draft's. Arithmetic is fp32.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.shared.logit_statistics import logit_statistics

BLOCK = 4096
"""Columns that a program has in registers at a time."""


def log_sum_exp(logits: Tensor) -> Tensor:
    """log Σ exp over the last dimension of logits [N, V], contiguous, one of a row finite at least: fp32 [N]."""
    if not len(logits):
        return logits.new_empty(0, dtype=torch.float32)
    statistics = logit_statistics(logits, temperature=1.0)
    return (statistics.chunk_maxima + statistics.chunk_sums.log()).logsumexp(-1)


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
    if TEACHER:
        teacher_ptr += row * vocab
        teacher_norm = tl.load(teacher_norm_ptr + row)
        is_here = (label >= 0) & (label < vocab)
        of_label = tl.load(teacher_ptr + label, mask=is_here).to(tl.float32)
        tl.store(terms_ptr + row * 3 + 2, tl.where(is_here, teacher_norm - of_label, 0.0))
    column = tl.arange(0, BLOCK)
    ce = tl.zeros([BLOCK], tl.float32)
    kl = tl.zeros([BLOCK], tl.float32)
    for start in range(0, vocab, BLOCK):
        here = start + column
        inside = here < vocab
        log_q = tl.load(logits_ptr + here, mask=inside, other=float("-inf")).to(tl.float32) - norm
        gradient = tl.exp(log_q)
        is_label = (here == label) & inside
        ce -= tl.where(is_label, log_q, 0.0)
        gradient -= tl.where(is_label, 1.0 - share, 0.0)
        if DISTILL:
            log_p = tl.load(teacher_ptr + here, mask=inside, other=float("-inf")).to(tl.float32) - teacher_norm
            p = tl.exp(log_p)
            kl += tl.where(p == 0.0, 0.0, p * (log_p - log_q))
            gradient -= share * p
        tl.store(logits_ptr + here, gradient, mask=inside)
    tl.store(terms_ptr + row * 3, tl.sum(ce, 0))
    tl.store(terms_ptr + row * 3 + 1, tl.sum(kl, 0))


def terms_and_gradient(
    logits: Tensor, teacher: Tensor | None, labels: Tensor, share: float, norm: Tensor, teacher_norm: Tensor | None
) -> Tensor:
    """fp32 [N, 3]: a token's cross-entropy with its label, KL(p ‖ q), and the teacher's own cross-entropy.

    Of q and p, the draft's and the teacher's distribution, `logits` and `teacher` [N, V] are contiguous parts, norm and
    teacher_norm fp32 [N] the log-sum-exp of the whole. The terms are this part's; a label, LongTensor [N], counted from
    the part's first token, may lie outside it. KL is 0 where share is, the last term where there is no teacher.
    Overwrites `logits` by the gradient of (1 - share) · cross-entropy + share · KL.
    """
    terms = torch.zeros(len(logits), 3, dtype=torch.float32, device=logits.device)
    if len(logits):
        _terms_kernel[(len(logits),)](
            logits,
            logits if teacher is None else teacher,
            labels,
            norm,
            norm if teacher_norm is None else teacher_norm,
            terms,
            logits.shape[1],
            share,
            TEACHER=teacher is not None,
            DISTILL=teacher is not None and share > 0,
            BLOCK=BLOCK,
            num_warps=8,
        )
    return terms
