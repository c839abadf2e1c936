"""Samplers of rows with equal settings, and transformers' own warpers, for tests."""

from collections.abc import Mapping
from typing import Any

import torch
from pairs import tiny_config
from transformers import GenerationConfig, LlamaForCausalLM, LogitsProcessorList

from longspec.inference.request import FILTERS, Sampling
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


_MODEL: Any = LlamaForCausalLM(tiny_config("llama"))


def transformers_warpers(temperature: float, options: Mapping[str, Any]) -> LogitsProcessorList:
    """Those of the filters that are set, as transformers itself orders them; other options are left out."""
    filters = {name: options.get(name, neutral) for name, neutral in FILTERS.items()}
    return _MODEL._get_logits_processor(GenerationConfig(do_sample=True, temperature=temperature, **filters))
