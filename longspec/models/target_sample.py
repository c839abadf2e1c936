"""A sample of a target's weights, saved with its draft: a draft of another target of the same shape is noticed."""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from longspec.errors import UserError

logger = logging.getLogger(__name__)

NAME_KEY, VALUES_KEY = "draft_target", "draft_target_sample"
"""Keys in a draft's `config.json` and in the metadata of its weight file."""
ROWS, COLUMNS = 8, 16
TOLERANCE = 2**-8
"""Largest relative difference of values that count as equal: the rounding error of bf16."""
MISMATCHES = 0.1
"""Largest share of values that may differ."""


@dataclass(frozen=True)
class TargetSample:
    name: str
    """Hub id or folder name of the target."""
    values: tuple[float, ...]
    """Values of the last layer's key projection."""

    def entries(self) -> dict[str, Any]:
        """The entries for a draft's files."""
        return {NAME_KEY: self.name, VALUES_KEY: list(self.values)}


def sampled_weight(model: Any) -> Tensor:
    """The weight that is sampled: the last layer's key projection [K·D, hidden]."""
    return model.model.layers[-1].self_attn.k_proj.weight


def take_sample(model: Any, name: str) -> TargetSample | None:
    """The sample of a pair's target, at the path or hub id `name`; None if it is quantized. The rows are of the first
    KV head, which rank 0 has if ranks share the target. Under ZeRO-3 the weight must be gathered."""
    weight = sampled_weight(model)
    if not weight.is_floating_point() or weight.ndim != 2 or weight.element_size() < 2:
        return None
    rows = torch.linspace(0, min(len(weight), 32) - 1, ROWS).long()
    columns = torch.linspace(0, weight.shape[1] - 1, COLUMNS).long()
    values = weight.detach()[rows.to(weight.device)][:, columns.to(weight.device)]
    label = Path(name).name if Path(name).exists() else name
    return TargetSample(label, tuple(float(f"{value:.6g}") for value in values.flatten().tolist()))


def read_sample(entries: Mapping[str, Any], source: str) -> TargetSample | None:
    """The sample in the entries of a draft's files; None if there is none. Raises UserError."""
    if VALUES_KEY not in entries:
        return None
    values = entries[VALUES_KEY]
    is_list = isinstance(values, list) and len(values) == ROWS * COLUMNS
    if not is_list or not all(isinstance(value, float | int) for value in values):
        raise UserError(f"{source}{VALUES_KEY}: must be a list of {ROWS * COLUMNS} numbers")
    return TargetSample(str(entries.get(NAME_KEY, "another target")), tuple(map(float, values)))


def warn_if_other_target(saved: TargetSample | None, own: TargetSample | None, draft: str) -> None:
    """Log a warning if a draft was trained for other weights than those of the loaded target."""
    if saved is None or own is None:
        return
    pairs = zip(saved.values, own.values, strict=True)
    # Below 6e-8, fp16 has no values.
    differing = sum(not math.isclose(a, b, rel_tol=TOLERANCE, abs_tol=1e-7) for a, b in pairs)
    if differing > MISMATCHES * len(own.values):
        logger.warning(
            "%s: this draft was trained for %s, whose weights are not those of %s; the output stays exact, but fewer "
            "tokens may be accepted",
            draft,
            saved.name,
            own.name,
        )
