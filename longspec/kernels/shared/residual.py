"""What the layers of a pass exchange (see `models.fused`)."""

from typing import NamedTuple

from torch import Tensor

RopeTable = tuple[Tensor, Tensor]
"""The target's rotary table at positions 0 … P - 1: cos, sin, each [P, D]."""


class HeadNorms(NamedTuple):
    """RMSNorm of each head of queries and keys, before the rotary embedding: weights [D] and eps."""

    q_weight: Tensor
    k_weight: Tensor
    eps: float


class TokenSlots(NamedTuple):
    """Positions of a pass's tokens in the sequence, and their slots in the KV cache of one layer."""

    positions: Tensor
    """int [B, N]"""
    rope: RopeTable
    keys: Tensor
    """[B, K, S, D], like `values`"""
    values: Tensor
    slots: Tensor
    """int [B, N]; a token with a negative slot is not stored."""
    rows: Tensor | None = None
    """int [B]: the row of the cache for each sequence of the pass; None for its own number."""
