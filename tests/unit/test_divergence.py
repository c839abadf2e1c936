"""The loss kernels against torch in fp64, and that against autograd."""

from itertools import product

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from longspec.kernels.torch import vocabulary
from longspec.kernels.torch.vocabulary import OUTSIDE
from longspec.kernels.triton.divergence import terms_and_gradient
from longspec.kernels.triton.logit_statistics import log_sum_exp

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""Error of one rounding of the gradient; the interpreter rounds toward 0."""
ROWS = 7


def exact(logits: Tensor, teacher: Tensor | None, labels: Tensor, share: float) -> tuple[Tensor, Tensor]:
    """Terms and gradient by torch in fp64."""
    gradient = logits.double().clone()
    wide_teacher = None if teacher is None else teacher.double()
    norm = gradient.logsumexp(-1)
    teacher_norm = None if wide_teacher is None else wide_teacher.logsumexp(-1)
    terms = vocabulary.terms_and_gradient(gradient, wide_teacher, labels, share, norm, teacher_norm)
    return terms, gradient


def logits_of(vocab: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Rows of logits that are sharp, flat, or far from zero."""
    random = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(seed))
    scale = torch.tensor([1.0, 5.0, 0.1, 3.0, 1.0, 8.0, 2.0])
    shift = torch.tensor([0.0, 0, 0, -40, 90, 0, -9])
    return (random * scale[:, None] + shift[:, None]).to(device, dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("vocab", "share", "teacher"),
    [*product([5], (0.0, 0.5, 1.0), [True]), (5, 0.0, False), (9001, 0.0, False), (9001, 0.5, True)],
)
def test_terms_and_gradient_equal_the_reference(
    vocab: int, share: float, teacher: bool, dtype: torch.dtype, device: str
) -> None:
    """Including labels in other parts of the vocabulary and outside the draft's."""
    logits = logits_of(vocab, dtype, device, seed=1)
    teacher_logits = logits_of(vocab, dtype, device, seed=2) if teacher else None
    labels = torch.tensor([0, vocab - 1, 3, -1, vocab, OUTSIDE, 2], device=device)
    expected, gradient = exact(logits, teacher_logits, labels, share)

    teacher_norm = None if teacher_logits is None else log_sum_exp(teacher_logits)
    terms = terms_and_gradient(logits, teacher_logits, labels, share, log_sum_exp(logits), teacher_norm)
    torch.testing.assert_close(terms.double(), expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(logits.double(), gradient, rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_torchs_gradient_is_that_of_the_terms(share: float) -> None:
    """Labels in other parts of the vocabulary have no cross-entropy with the rows of this part."""
    logits = logits_of(9, torch.float64, "cpu", seed=1).requires_grad_()
    teacher = logits_of(9, torch.float64, "cpu", seed=2)
    labels = torch.tensor([0, 8, OUTSIDE, -1, 9, 7, 2])
    log_q, log_p = logits.log_softmax(-1), teacher.log_softmax(-1)
    onehot = (torch.arange(9) == labels[:, None]).double()
    kl = (log_p.exp() * (log_p - log_q)).sum(1)
    expected = torch.stack([-(onehot * log_q).sum(1), kl if share else 0 * kl, -(onehot * log_p).sum(1)], 1)
    # The normalizer's part of a cross-entropy belongs to all rows but OUTSIDE ones, whatever part has the label.
    normalized = (logits.logsumexp(1) * (labels != OUTSIDE)).sum() - (onehot * logits).sum()
    ((1 - share) * normalized + share * kl.sum()).backward()
    terms, gradient = exact(logits.detach(), teacher, labels, share)
    torch.testing.assert_close((terms, gradient), (expected.detach(), logits.grad))


@pytest.mark.parametrize("cut", [1, 4096, 4099])
def test_terms_of_parts_of_a_vocabulary_add_up(cut: int, device: str) -> None:
    """With the log-sum-exp of the whole vocabulary; a part may be a single token."""
    logits, teacher = (logits_of(4100, torch.float32, device, seed) for seed in (1, 2))
    labels = torch.tensor([0, 4099, 3, 4098, 7, 4096, 2], device=device)
    expected, gradient = exact(logits, teacher, labels, 0.5)

    norm, teacher_norm = log_sum_exp(logits), log_sum_exp(teacher)
    total = torch.zeros_like(expected)
    parts = []
    for first, last in ((0, cut), (cut, 4100)):
        part = logits[:, first:last].contiguous()
        teacher_part = teacher[:, first:last].contiguous()
        total += terms_and_gradient(part, teacher_part, labels - first, 0.5, norm, teacher_norm)
        parts.append(part)
    torch.testing.assert_close(total, expected, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(torch.cat(parts, 1).double(), gradient, rtol=1e-5, atol=1e-6)


def test_tokens_impossible_for_both_add_nothing_and_a_broken_teacher_gives_nan(device: str) -> None:
    logits, teacher = (logits_of(9, torch.float32, device, seed) for seed in (1, 2))
    logits[:, 4] = teacher[:, 4] = -torch.inf
    teacher[2, 0] = torch.nan
    labels = torch.zeros(ROWS, dtype=torch.long, device=device)
    expected, gradient = exact(logits, teacher, labels, 1.0)

    terms = terms_and_gradient(logits, teacher, labels, 1.0, log_sum_exp(logits), log_sum_exp(teacher))
    assert terms[:, 1].isnan().tolist() == expected[:, 1].isnan().tolist() == [row == 2 for row in range(ROWS)]
    torch.testing.assert_close(terms, expected.float(), rtol=1e-5, atol=2e-6, equal_nan=True)
    torch.testing.assert_close(logits, gradient.float(), rtol=1e-5, atol=1e-6, equal_nan=True)


def test_no_tokens_have_no_terms(device: str) -> None:
    empty = torch.empty(0, 9, device=device)
    assert log_sum_exp(empty).shape == (0,)
    labels = torch.empty(0, dtype=torch.long, device=device)
    assert terms_and_gradient(empty, None, labels, 0.0, log_sum_exp(empty), None).shape == (0, 3)
