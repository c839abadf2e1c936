"""Log-probabilities of tokens and of their alternatives, of the target's distribution at temperature 1."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from longspec.inference.engine.requests import MOST_ALTERNATIVES, Alternatives

LEAST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


class TokenScore(NamedTuple):
    """The log-probability of a token and the most probable tokens at its place."""

    logprob: float
    alternatives: Alternatives

    @classmethod
    def read(cls, line: list[float], count: int) -> TokenScore:
        """line: a row of `scores`. count: alternatives to keep."""
        most = (len(line) - 1) // 2
        ids, values = line[1 : most + 1], line[most + 1 :]
        pairs = zip(map(int, ids[:count]), values[:count], strict=True)
        return cls(max(line[0], LEAST), [(token, max(value, LEAST)) for token, value in pairs])


def scores(logits: Tensor, tokens: Tensor) -> Tensor:
    """For each of tokens [...] under logits [..., V]: fp64 [..., 1 + 2 * k], with k = MOST_ALTERNATIVES or V if less.

    The token's log-probability, then the ids of the k most probable tokens, then their log-probabilities.
    """
    # One tensor for all, so that the most probable token has the log-probability of its alternative, to the bit.
    log_p = logits.to(torch.promote_types(logits.dtype, torch.float32)).log_softmax(-1)
    best = log_p.topk(min(MOST_ALTERNATIVES, log_p.shape[-1]), dim=-1)
    own = log_p.gather(-1, tokens[..., None])
    return torch.cat([own.double(), best.indices.double(), best.values.double()], -1)
