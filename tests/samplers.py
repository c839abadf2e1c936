"""Samplers of rows with equal settings, and transformers' own warpers, for tests."""

from collections.abc import Mapping
from typing import Any

import torch
from transformers import (
    EpsilonLogitsWarper,
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
    TypicalLogitsWarper,
)

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


WARPERS: dict[str, Any] = {
    "top_k": TopKLogitsWarper,
    "top_p": TopPLogitsWarper,
    "min_p": MinPLogitsWarper,
    "typical_p": TypicalLogitsWarper,
    "epsilon_cutoff": EpsilonLogitsWarper,
}


def transformers_warpers(temperature: float, options: Mapping[str, Any]) -> LogitsProcessorList:
    """Those of the options that are set, in transformers' order; other options are left out."""
    own = [warper(options[name]) for name, warper in WARPERS.items() if name in options]
    return LogitsProcessorList([TemperatureLogitsWarper(temperature), *own])
