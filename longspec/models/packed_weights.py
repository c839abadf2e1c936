"""Products of few tokens with fp32 weights on a CPU, from copies of the weights in the layout of MKL's kernels.

BLAS lays a weight out anew in each product of several tokens, which takes a large part of the time if they are few. A
product with a packed copy saves it. docs/performance-log.md has the times.
"""

from __future__ import annotations

from functools import cache
from threading import RLock
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor, nn

LEAST_ROWS, MOST_ROWS = 2, 16
"""Numbers of tokens for which a product with a packed weight is faster."""

_mkl: Any = torch.ops.mkl
_lock = RLock()
_packs: WeakKeyDictionary[nn.Module, PackedWeights] = WeakKeyDictionary()


class _Pack(NamedTuple):
    weight: Tensor | None
    """The copy; None if there was no room for it."""
    check: Tensor | None
    """[out]: product of the weight that was packed with a fixed random vector."""
    bytes: int
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
        self.lock = RLock()

    def start_call(self, limit: int) -> None:
        """Let the copies be compared with their weights before their next use. limit: bytes.

        A server makes one call, so weights must not change while it runs.
        """
        with self.lock:
            # Weights that have moved leave copies that no call uses.
            used = {key: pack for key, pack in self.packs.items() if pack.call == self.call}
            self.packs = {key: pack for key, pack in (used or self.packs).items() if pack.weight is not None}
            if self.bytes > limit:
                self.packs.clear()
            self.call += 1
            self.limit = limit

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """x @ weight.T + bias, x [B, N, in], weight [out, in]: [B, N, out]."""
        rows = x.shape[0] * x.shape[1]
        pack = self._pack(weight.detach()) if LEAST_ROWS <= rows <= MOST_ROWS and _can_pack(weight) else None
        if pack is None:
            return F.linear(x, weight, bias)
        return _mkl._mkl_linear(x.contiguous(), pack, weight, bias, rows)

    def _pack(self, weight: Tensor) -> Tensor | None:
        """The copy of a weight; None if there is no room for it."""
        key = (weight.data_ptr(), weight.shape)
        pack = self.packs.get(key)
        if pack is not None and pack.call == self.call:
            return pack.weight
        with self.lock:
            pack = self._checked(weight, self.packs.pop(key, None))
            self.packs[key] = pack
        return pack.weight

    def _checked(self, weight: Tensor, old: _Pack | None) -> _Pack:
        """`old` if it is a copy of the weight as it is now, else a new copy."""
        if self.bytes + weight.nbytes > self.limit:
            return _Pack(None, None, 0, self.call)
        # Weights can change in place between calls. A change that this product does not show is of the order of its
        # rounding.
        check = weight @ _random_vector(weight.shape[1])
        if old is not None and old.check is not None and torch.equal(old.check, check):
            return old._replace(call=self.call)
        return _Pack(_mkl._mkl_reorder_linear_weight(weight, MOST_ROWS), check, weight.nbytes, self.call)

    @property
    def bytes(self) -> int:
        """Size of all copies."""
        return sum(pack.bytes for pack in list(self.packs.values()))


def packed_weights(model: nn.Module) -> PackedWeights:
    """The copies of a model's weights, which go with the model."""
    with _lock:
        return _packs.setdefault(model, PackedWeights())


@cache
def _random_vector(width: int) -> Tensor:
    """fp32 [width], between 1 and 2."""
    with torch.inference_mode(False):
        return 1 + torch.rand(width, generator=torch.Generator().manual_seed(0))


def _can_pack(weight: Tensor) -> bool:
    return weight.is_cpu and weight.dtype == torch.float32 and weight.is_contiguous() and has_mkl()


@cache
def has_mkl() -> bool:
    """Whether this build of torch has MKL's packed products."""
    return torch.backends.mkl.is_available() and hasattr(_mkl, "_mkl_linear")
