"""8-bit storage of a draft's matrices: int8 values and one fp32 scale per row, half the size of bf16.

    scale[i] = max_j |w[i, j]| / 127        stored[i, j] = round(w[i, j] / scale[i])

Only the file is quantized: a loaded draft has the dtype of its target.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from longspec.errors import UserError

SCALE = "_scale"
"""Suffix of the name of a matrix's scales."""
LARGEST = 127


def quantized(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` with each floating-point matrix NAME as int8 [rows, columns] and NAME_scale, fp32 [rows]."""
    stored: dict[str, Tensor] = {}
    for name, weight in state.items():
        if weight.dim() != 2 or not weight.is_floating_point():
            stored[name] = weight
            continue
        rows = weight.float()
        scale = rows.abs().amax(1) / LARGEST
        stored[name] = (rows / scale.where(scale > 0, 1.0)[:, None]).round().to(torch.int8)
        stored[name + SCALE] = scale
    return stored


def dequantized(state: Mapping[str, Tensor], source: str) -> dict[str, Tensor]:
    """The matrices that `quantized` stored as fp32 [rows, columns], and all other tensors unchanged.

    source: the draft, for the message. Raises UserError for scales that do not fit their matrix.
    """
    restored = dict(state)
    for name in [name for name, weight in state.items() if weight.dtype == torch.int8]:
        scale = restored.pop(name + SCALE, None)
        if scale is None or scale.shape != state[name].shape[:1]:
            raise UserError(f"{source}: {name} is int8 without {name + SCALE}, one scale per row; save the draft again")
        restored[name] = state[name].float() * scale.float()[:, None]
    return restored
