"""An objective's terms and gradient by the kernels, against the plain formulas in fp64."""

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from longspec.kernels.training.divergence import log_sum_exp, terms_and_gradient
from longspec.train.loss import _plain_terms

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3, torch.float16: 1e-3}
"""For one rounding of the gradient, which the interpreter does towards 0."""
ROWS = 7


def logits_of(vocab: int, dtype: torch.dtype, device: str, seed: int) -> Tensor:
    """Some rows sharp, some flat, some far from zero."""
    random = torch.randn(ROWS, vocab, generator=torch.Generator().manual_seed(seed))
    scale, shift = torch.tensor([1.0, 5.0, 0.1, 3.0, 1.0, 8.0, 2.0]), torch.tensor([0.0, 0, 0, -40, 90, 0, -9])
    return (random * scale[:, None] + shift[:, None]).to(device, dtype)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("vocab", [1, 5, 4096, 9001])
def test_log_sum_exp_is_torchs(vocab: int, dtype: torch.dtype, device: str) -> None:
    logits = logits_of(vocab, dtype, device, seed=0)
    torch.testing.assert_close(log_sum_exp(logits), logits.double().logsumexp(-1).float(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(("share", "teacher"), [(0.0, False), (0.0, True), (0.5, True), (1.0, True)])
@pytest.mark.parametrize("vocab", [5, 4096, 9001])
def test_terms_and_gradient_are_the_formulas(
    vocab: int, share: float, teacher: bool, dtype: torch.dtype, device: str
) -> None:
    """With labels that lie in the vocabulary's other parts, too."""
    logits, target = (logits_of(vocab, dtype, device, seed) for seed in (1, 2))
    labels = torch.tensor([0, vocab - 1, 3, -1, vocab, -vocab, 2], device=device)
    given = target if teacher else None
    wanted, gradient = _plain_terms(logits.double(), None if given is None else given.double(), labels, share)
    norm, teacher_norm = log_sum_exp(logits), None if given is None else log_sum_exp(given)
    terms = terms_and_gradient(logits, given, labels, share, norm, teacher_norm)
    torch.testing.assert_close(terms.double(), wanted, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(logits.double(), gradient, rtol=TOLERANCE[dtype], atol=1e-6)


@pytest.mark.parametrize("cut", [1, 4096, 4099])
def test_parts_of_a_vocabulary_add_up(cut: int, device: str) -> None:
    """Given the whole's log-sum-exp, the terms of the ranks' parts, of which one may be small, sum to the whole's."""
    logits, target = (logits_of(4100, torch.float32, device, seed) for seed in (1, 2))
    labels = torch.tensor([0, 4099, 3, 4098, 7, 4096, 2], device=device)
    wanted, gradient = _plain_terms(logits.double(), target.double(), labels, 0.5)
    norm, teacher_norm = log_sum_exp(logits), log_sum_exp(target)
    total = torch.zeros_like(wanted)
    parts = []
    for first, last in ((0, cut), (cut, 4100)):
        part = logits[:, first:last].contiguous()
        teacher = target[:, first:last].contiguous()
        total += terms_and_gradient(part, teacher, labels - first, 0.5, norm, teacher_norm)
        parts.append(part)
    torch.testing.assert_close(total, wanted, rtol=1e-4, atol=2e-5)
    torch.testing.assert_close(torch.cat(parts, 1).double(), gradient, rtol=1e-5, atol=1e-6)


def test_what_is_impossible_for_both_costs_nothing_and_a_broken_teacher_shows(device: str) -> None:
    logits, target = (logits_of(9, torch.float32, device, seed) for seed in (1, 2))
    logits[:, 4] = target[:, 4] = -torch.inf
    target[2, 0] = torch.nan
    labels = torch.zeros(ROWS, dtype=torch.long, device=device)
    wanted, gradient = _plain_terms(logits.clone(), target.clone(), labels, 1.0)
    terms = terms_and_gradient(logits, target, labels, 1.0, log_sum_exp(logits), log_sum_exp(target))
    assert terms[:, 1].isnan().tolist() == wanted[:, 1].isnan().tolist() == [row == 2 for row in range(ROWS)]
    torch.testing.assert_close(terms, wanted, rtol=1e-5, atol=1e-6, equal_nan=True)
    torch.testing.assert_close(logits, gradient, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_a_distribution_equal_to_the_teachers_has_no_divergence(device: str) -> None:
    logits = logits_of(4100, torch.bfloat16, device, seed=3)
    norm = log_sum_exp(logits)
    labels = torch.zeros(ROWS, dtype=torch.long, device=device)
    terms = terms_and_gradient(logits, logits.clone(), labels, 1.0, norm, norm)
    assert not terms[:, 1].any() and not logits.any()


def test_no_tokens_have_no_terms(device: str) -> None:
    empty = torch.empty(0, 9, device=device)
    assert log_sum_exp(empty).shape == (0,)
    labels = torch.empty(0, dtype=torch.long, device=device)
    assert terms_and_gradient(empty, None, labels, 0.0, log_sum_exp(empty), None).shape == (0, 3)
