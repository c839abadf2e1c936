"""The layers on a CPU in float32: compiled kernels for few tokens, torch for more."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.kernels.native import operations
from longspec.kernels.native.operations import MOST_TOKENS, Stores
from longspec.kernels.shared.residual import HeadNorms, ResidualStream, TokenSlots
from longspec.kernels.torch.layers import TorchStream


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `Backend.linear`."""
    if x.shape[0] * x.shape[1] > MOST_TOKENS:
        return F.linear(x, weight, bias)
    return operations.product(x.contiguous(), weight, bias)


def stream(hidden: Tensor, eps: float) -> ResidualStream:
    """See `Backend.stream`."""
    is_small = hidden.shape[0] * hidden.shape[1] <= MOST_TOKENS
    return _NativeStream(hidden, eps) if is_small else TorchStream(hidden, eps)


class _NativeStream(ResidualStream):
    linear = staticmethod(linear)

    def __init__(self, hidden: Tensor, eps: float) -> None:
        super().__init__(hidden.contiguous(), eps)
        # Positions and slots are the same in all layers, and so are these.
        self.positions: Tensor | None = None
        """LongTensor [B, N]"""
        self.places: Tensor | None = None
        """As in `Stores`."""

    def normed(self, norm: Tensor) -> Tensor:
        return operations.rms_norm(self.hidden, norm, self.eps)

    def project_gated(self, norm: Tensor, weight: Tensor) -> Tensor:
        return operations.gated_product(self.normed(norm), weight)

    def add_product(self, x: Tensor, weight: Tensor, last: bool = False) -> None:
        operations.add_product(self.hidden, x.contiguous(), weight)

    def rotate_and_store(self, qkv: Tensor, slots: TokenSlots, norms: HeadNorms | None = None) -> Tensor:
        row_stride, head_dim = slots.keys.stride(0), slots.keys.shape[3]
        if self.places is None:
            assert slots.rows is None  # only captured passes select rows
            rows = torch.arange(len(qkv), device=qkv.device)
            places = rows[:, None] * row_stride + slots.slots * head_dim
            self.places = places.where(slots.slots >= 0, -1).long().contiguous()
        stores = Stores(slots.keys, slots.values, self.places)
        return operations.rotate_and_store(qkv, self._positions(slots), slots.rope, head_dim, stores, norms)

    def rotate(self, q: Tensor, slots: TokenSlots, head_dim: int) -> Tensor:
        return operations.rotate_and_store(q, self._positions(slots), slots.rope, head_dim)

    def _positions(self, slots: TokenSlots) -> Tensor:
        if self.positions is None:
            self.positions = slots.positions.long().contiguous()
        return self.positions
