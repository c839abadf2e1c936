"""Operations over the vocabulary in plain torch, in fp32 or wider."""

from __future__ import annotations

import torch
from torch import Tensor

from longspec.kernels.shared.watch import Watch


def over_temperature(logits: Tensor, temperature: Tensor | None) -> Tensor:
    """Logits [B, ..., V] in fp32 or wider, divided by temperature, fp64 [B]; None is 1."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return wide if temperature is None else wide / temperature.to(wide.dtype).view(-1, *[1] * (logits.dim() - 1))


def softmax(logits: Tensor, temperature: Tensor | None, watch: Watch | None = None) -> Tensor:
    """See `Backend.softmax`."""
    probabilities = over_temperature(logits, temperature).softmax(-1)
    if watch is not None:
        watch.record(probabilities[..., 0].isnan())  # a row that defines no distribution is NaN throughout
    return probabilities


def log_sum_exp(logits: Tensor) -> Tensor:
    """See `Backend.log_sum_exp`."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32)).logsumexp(-1)


def argmax(values: Tensor, watch: Watch | None = None) -> Tensor:
    """See `Backend.argmax`."""
    if values.is_cpu and values.dtype in (torch.float32, torch.float64):
        index = torch.from_numpy(values.numpy().argmax(-1))  # over a vocabulary, torch takes ten times as long
    else:
        index = values.max(-1).indices
    if watch is not None:
        watch.record(~values.gather(-1, index[..., None]).isfinite())
    return index


def first_arrival(weights: Tensor, noise: Tensor) -> Tensor:
    """See `Backend.first_arrival`."""
    return argmax(weights / noise)
