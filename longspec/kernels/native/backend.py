"""The backend of a CPU in float32: compiled functions for few tokens, torch for more and for everything else."""

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.kernels.backend import Backend
from longspec.kernels.native import operations
from longspec.kernels.native.operations import MOST_QUERIES, MOST_TOKENS, attention
from longspec.kernels.shared.attention import Attend
from longspec.kernels.shared.residual import HeadNorms, TokenSlots
from longspec.kernels.torch.attention import DecodingAttention
from longspec.kernels.torch.layers import ResidualStream


class NativeAttention(DecodingAttention):
    """Decoding attention on the functions of `kernels.native`."""

    name = "native"

    def hybrid(self, lengths: Tensor, tree_mask: Tensor) -> Attend:
        if _are_many(tree_mask):
            return super().hybrid(lengths, tree_mask)
        lengths, tree_mask = lengths.int().contiguous(), tree_mask.contiguous()

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            return attention(q, k, v, lengths, tree_mask, scale)

        return attend

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
        if _are_many(q.transpose(1, 2)):
            return super().prefix(q, k, v, lengths, scale)
        return attention(q, k, v, lengths.int().contiguous(), None, scale)

    def window(
        self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, level: int, tree_mask: Tensor, scale: float
    ) -> Tensor:
        if _are_many(tree_mask):
            return super().window(q, k, v, lengths, level, tree_mask, scale)
        window = k.shape[2] - tree_mask.shape[2]
        lengths, tree_mask = lengths.int().contiguous(), tree_mask.contiguous()
        return attention(q, k, v, lengths, tree_mask, scale, window, level)


def _are_many(queries: Tensor) -> bool:
    """Whether there are too many queries [B, N, ...]."""
    return queries.shape[0] * queries.shape[1] > MOST_QUERIES


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `Backend.linear`."""
    if x.shape[0] * x.shape[1] > MOST_TOKENS:
        return F.linear(x, weight, bias)
    return operations.product(x.contiguous(), weight, bias)


def _stream(hidden: Tensor, eps: float) -> ResidualStream:
    is_small = hidden.shape[0] * hidden.shape[1] <= MOST_TOKENS
    return _NativeStream(hidden, eps) if is_small else ResidualStream(hidden, eps)


class _NativeStream(ResidualStream):
    linear = staticmethod(_linear)

    def __init__(self, hidden: Tensor, eps: float) -> None:
        super().__init__(hidden.contiguous(), eps)
        self.positions: Tensor | None = None
        """LongTensor [B, N]"""
        self.places: Tensor | None = None
        """As in `operations.rotate_and_store`."""

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
        return operations.rotate_and_store(qkv, self._positions(slots), slots, self.places, norms)

    def rotate(self, q: Tensor, slots: TokenSlots) -> Tensor:
        return operations.rotate_and_store(q, self._positions(slots), slots)

    def _positions(self, slots: TokenSlots) -> Tensor:
        if self.positions is None:
            self.positions = slots.positions.long().contiguous()
        return self.positions


class NativeBackend(Backend):
    """Layers on compiled functions, all else on torch."""

    name = "native"

    linear = staticmethod(_linear)
    stream = staticmethod(_stream)
