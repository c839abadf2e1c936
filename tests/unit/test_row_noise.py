"""Random numbers per row: the kernel against plain torch, their law, and that a row's numbers are its own."""

import pytest
import torch
from kernel_devices import DEVICES

from longspec.kernels.torch.row_noise import row_noise

SEEDS = torch.tensor([0, 5, -1, 2**62])
POSITIONS = torch.tensor([0, 3, 7, 100], dtype=torch.int32)
CONSTANT = torch.tensor([False, True, False, False])


@pytest.mark.parametrize("device", DEVICES)
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
