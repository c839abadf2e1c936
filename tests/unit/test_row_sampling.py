"""Sampling with settings per row, against transformers' warpers."""

import pytest
import torch
from samplers import transformers_warpers

from longspec.inference.request import Sampling
from longspec.inference.row_settings import RowSettings
from longspec.inference.sampling import Sampler, sampling_kind

VOCAB = 13
ROWS = [
    Sampling(),
    Sampling(0.7),
    Sampling(1.0, top_k=3),
    Sampling(1.5, top_p=0.6),
    Sampling(0.9, top_p=0.8, top_k=5),
    Sampling(0.0, top_p=0.5, top_k=2),
    Sampling(1.0, top_p=1e-6),
    Sampling(1.0, top_k=VOCAB + 5),
    Sampling(1.2, min_p=0.2),
    Sampling(1.0, typical_p=0.7),
    Sampling(0.8, epsilon_cutoff=0.05),
    Sampling(1.3, top_k=9, top_p=0.9, min_p=0.05, typical_p=0.9, epsilon_cutoff=0.02),
]


def settings() -> RowSettings:
    rows = RowSettings.allocate(len(ROWS), torch.device("cpu"))
    rows.assign(slice(0, len(ROWS)), ROWS, [2**64 - 1 - row for row in range(len(ROWS))])
    rows.positions.copy_(torch.arange(len(ROWS)))
    return rows


def transformers_probabilities(logits: torch.Tensor, sampling: Sampling) -> torch.Tensor:
    """logits [N, V]."""
    if sampling.greedy:
        return torch.nn.functional.one_hot(logits.argmax(-1), VOCAB).float()
    warpers = transformers_warpers(sampling.temperature, {name: getattr(sampling, name) for name in sampling.filters})
    return warpers(None, logits).softmax(-1)  # type: ignore[arg-type]


@pytest.mark.parametrize("nodes", [(), (4,)])
def test_each_row_has_its_own_distribution(nodes: tuple[int, ...]) -> None:
    """In a batch with all kinds of rows, and alone."""
    logits = 3 * torch.randn(len(ROWS), *nodes, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[4, ..., 3] = -torch.inf
    p = Sampler(sampling_kind(ROWS), settings()).probabilities(logits)
    for row, sampling in enumerate(ROWS):
        expected = transformers_probabilities(logits[row].view(-1, VOCAB), sampling).view(logits[row].shape)
        torch.testing.assert_close(p[row], expected)
        assert torch.equal(p[row] == 0, expected == 0)
        if not sampling.greedy:
            alone = Sampler(sampling_kind([sampling]), settings().narrow(slice(row, row + 1)))
            torch.testing.assert_close(alone.probabilities(logits[row, None])[0], expected)
