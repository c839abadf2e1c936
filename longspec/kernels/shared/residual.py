"""The residual stream of a pass through fused layers (see `models.fused`)."""

from __future__ import annotations

from typing import NamedTuple, Protocol

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


class ResidualStream(Protocol):
    """Hidden states [B, N, hidden] that the layers of a pass add to; `hidden` is changed in place.

    A stream serves one pass, so positions and slots are the same in all layers.
    """

    hidden: Tensor
    eps: float

    def __init__(self, hidden: Tensor, eps: float) -> None:
        """eps: the epsilon of every RMSNorm in the pass."""
        self.hidden, self.eps = hidden, eps

    @staticmethod
    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """`Backend.linear`."""

    def current(self) -> Tensor:
        """A copy of the hidden states with all that was added so far."""
        return self.hidden.clone()

    def normed(self, norm: Tensor) -> Tensor:
        """RMSNorm of the stream with weight `norm`: [B, N, hidden]."""

    def project(self, norm: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """linear(RMSNorm(stream)): [B, N, out]."""
        return self.linear(self.normed(norm), weight, bias)

    def project_gated(self, norm: Tensor, weight: Tensor) -> Tensor:
        """silu(gate) · up of RMSNorm(stream); weight [2·I, hidden], gates first: [B, N, I]."""

    def add(self, x: Tensor) -> None:
        """stream += x, [B, N, hidden] or, the same for all tokens of a row, [B, 1, hidden]."""
        self.hidden.add_(x)

    def add_product(self, x: Tensor, weight: Tensor, last: bool = False) -> None:
        """stream += x @ weight.T, x [B, N, in]. last: no norm follows."""

    def rotate_and_store(self, qkv: Tensor, slots: TokenSlots, norms: HeadNorms | None = None) -> Tensor:
        """Write the keys and values of a merged projection [B, N, (H + 2K)·D] to the cache.

        Returns the rotated queries [B, H, N, D].
        """

    def rotate(self, q: Tensor, slots: TokenSlots, head_dim: int) -> Tensor:
        """Rotary embedding of q, contiguous [B, N, H·D]: [B, H, N, D]."""
