"""Samplers of rows with equal settings, for tests."""

import torch

from longspec.inference.request import Sampling
from longspec.inference.row_settings import RowSettings
from longspec.inference.sampling import Sampler, sampling_kind
from longspec.kernels.choice import backend_of


def sampler(
    temperature: float, rows: int, seed: int = 0, device: str | torch.device = "cpu", **settings: float
) -> Sampler:
    """A sampler of `rows` rows with the seeds seed, seed + 1, ..., for verification."""
    sampling = Sampling(temperature, **settings)  # type: ignore[arg-type]
    own = RowSettings.allocate(rows, torch.device(device))
    own.assign(slice(0, rows), [sampling] * rows, range(seed, seed + rows))
    made = Sampler(sampling_kind([sampling]), own)
    made.backend = backend_of(torch.device(device), torch.float32)
    return made
