"""Products of few tokens with fp32 weights on a CPU, from copies of the weights in the layout of MKL's kernels.

BLAS lays a weight out anew in each call. For one token it need not, and for many tokens this takes little of the time.
In between, a product with a packed copy is faster: on two cores, 16 tokens of a target of 135M parameters take 37
instead of 44 ms, 8 tokens 27 instead of 47 ms.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAST_ROWS, MOST_ROWS = 2, 16
"""Numbers of tokens for which a product with a packed weight is faster."""

_mkl: Any = torch.ops.mkl
_packs: WeakKeyDictionary[nn.Module, PackedWeights] = WeakKeyDictionary()


class _Pack(NamedTuple):
    weight: Tensor
    check: Tensor
    """[out]: product of the weight that was packed with a fixed random vector."""
    call: int
    """Number of the last call that used it."""


class PackedWeights:
    """Packed copies of a model's weights, each made at its first use. The modules keep their own weights."""

    def __init__(self) -> None:
        self.packs: dict[tuple[int, torch.Size], _Pack] = {}
        """By the address and the shape of the weight."""
        self.call = 0
        self.limit = 0
        """Largest size of all copies in bytes; other weights are not packed."""

    def start_call(self, limit: int) -> None:
        """Let the copies be compared with their weights before their next use. limit: bytes."""
        # Weights that have moved leave copies that no call uses.
        if used := {key: pack for key, pack in self.packs.items() if pack.call == self.call}:
            self.packs = used
        self.call += 1
        self.limit = limit

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias, x [B, N, in], weight [out, in]: [B, N, out]."""
        rows = x.shape[0] * x.shape[1]
        pack = self._pack(weight) if LEAST_ROWS <= rows <= MOST_ROWS and _can_pack(weight) else None
        if pack is None:
            return F.linear(x, weight, bias)
        return _mkl._mkl_linear(x.contiguous(), pack, weight, bias, rows)

    def forget(self, weight: Tensor) -> None:
        """Drop the copies of a weight, and of its first rows."""
        for key in [key for key in self.packs if key[0] == weight.data_ptr()]:
            del self.packs[key]

    def _pack(self, weight: Tensor) -> Tensor | None:
        """The copy of a weight; None if there is no room for it."""
        key = (weight.data_ptr(), weight.shape)
        pack = self.packs.get(key)
        if pack is not None and pack.call == self.call:
            return pack.weight
        # Weights can change in place between calls. A change that this product does not show is lost in the rounding of
        # others, too.
        vector = 1 + torch.rand(weight.shape[1], generator=torch.Generator().manual_seed(0))
        check = weight @ vector
        if pack is not None and torch.equal(pack.check, check):
            self.packs[key] = pack._replace(call=self.call)
            return pack.weight
        if self.bytes + weight.nbytes > self.limit:
            return None
        packed = _mkl._mkl_reorder_linear_weight(weight, MOST_ROWS)
        self.packs[key] = _Pack(packed, check, self.call)
        return packed

    @property
    def bytes(self) -> int:
        """Size of all copies."""
        return sum(pack.weight.numel() * 4 for pack in self.packs.values())


def packed_weights(model: nn.Module) -> PackedWeights:
    """The copies of a model's weights, which go with the model."""
    return _packs.setdefault(model, PackedWeights())


def _can_pack(weight: Tensor) -> bool:
    return weight.is_cpu and weight.dtype == torch.float32 and weight.is_contiguous() and has_mkl()


@cache
def has_mkl() -> bool:
    """Whether this build of torch has MKL's packed products."""
    return torch.backends.mkl.is_available() and hasattr(_mkl, "_mkl_linear")
