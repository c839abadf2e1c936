"""Random numbers per row, and sampling with settings per row, against plain torch and transformers' warpers."""

import pytest
import torch
from samplers import transformers_warpers

from longspec.inference.request import Sampling
from longspec.inference.row_settings import RowSettings
from longspec.inference.sampling import Sampler, sampling_kind
from longspec.kernels.torch.row_noise import row_noise

pytestmark = pytest.mark.kernel

SEEDS = torch.tensor([0, 5, -1, 2**62])
POSITIONS = torch.tensor([0, 3, 7, 100], dtype=torch.int32)
CONSTANT = torch.tensor([False, True, False, False])


@pytest.mark.parametrize("stream", [0, 1, 5 << 20])
def test_the_kernel_has_the_bits_of_the_reference(device: str, stream: int) -> None:
    kernel = pytest.importorskip("longspec.kernels.triton.row_noise").row_noise
    seeds, positions, constant = (x.to(device) for x in (SEEDS, POSITIONS, CONSTANT))
    uniforms = kernel(seeds, positions, stream, (3, 421))
    assert torch.equal(uniforms.cpu(), row_noise(SEEDS, POSITIONS, stream, (3, 421)))
    exponentials = kernel(seeds, positions, stream, (3, 421), constant)
    expected = row_noise(SEEDS, POSITIONS, stream, (3, 421), CONSTANT)
    torch.testing.assert_close(exponentials.cpu(), expected, rtol=1e-14, atol=0)


def test_law_of_the_numbers() -> None:
    seeds, positions = torch.arange(40) // 8, torch.arange(40) % 8
    uniforms = row_noise(seeds, positions, 0, (2500,))
    exponentials = row_noise(seeds, positions, 1, (2500,), torch.zeros(40, dtype=torch.bool))
    assert exponentials.min() > 0 and exponentials.isfinite().all()
    both = torch.cat([uniforms, 1 - (-exponentials).exp()])
    ordered = both.flatten().sort().values
    steps = torch.arange(1, len(ordered) + 1) / len(ordered)
    assert (ordered - steps).abs().max() < 1.95 / len(ordered) ** 0.5  # Kolmogorov-Smirnov at a level of 1e-3
    correlations = torch.corrcoef(both).triu(1).abs()  # seeds, positions and streams are unrelated
    assert correlations.max() < 5.2 / 2500**0.5  # 3,160 pairs at a level of 1e-3


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
