"""A digest of a draft's weights."""

from __future__ import annotations

import hashlib
import json

import torch

from longspec.models.glide import GlideMixin


def draft_fingerprint(model: GlideMixin) -> str:
    """A digest of the draft's weights.

    It is made of the sum of each weight's bit patterns as integers, which is the same on every device.
    """
    integers = {2: torch.int16, 4: torch.int32, 8: torch.int64}
    sums = {}
    for name, weight in model.draft_model.named_parameters():
        bits = weight.detach().contiguous().view(integers[weight.element_size()])
        sums[name] = int(bits.sum(dtype=torch.int64))
    return hashlib.sha256(json.dumps(sums, sort_keys=True, default=str).encode()).hexdigest()[:32]
