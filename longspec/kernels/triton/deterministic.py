"""The backend whose results for a token depend on the tokens before it alone, bit for bit.

A row's sums have one order for any number of rows, in products and in attention. Hence a tree's tokens, and the keys
and values that it leaves in the cache, are those of decoding one token at a time, in any batch.
"""

from __future__ import annotations

from torch import Tensor

from longspec.kernels.triton.backend import TritonBackend
from longspec.kernels.triton.layers import TritonStream
from longspec.kernels.triton.skinny_product import skinny_product, split_product


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `Backend.linear`."""
    return skinny_product(x.flatten(0, 1), weight, bias, fixed_order=True).unflatten(0, x.shape[:2])


class DeterministicStream(TritonStream):
    """All products are skinny ones in a fixed order, those of a branch's output in parts for the next norm."""

    linear = staticmethod(linear)

    def __init__(self, hidden: Tensor, eps: float) -> None:
        super().__init__(hidden, eps)
        self.is_vector, self.is_skinny = False, True

    def project_gated(self, norm: Tensor, weight: Tensor) -> Tensor:
        normed = self.normed(norm)
        return skinny_product(normed.flatten(0, 1), weight, gated=True, fixed_order=True).unflatten(0, normed.shape[:2])

    def add_product(self, x: Tensor, weight: Tensor, last: bool = False) -> None:
        if last:  # only in a draft, whose sums may have any order
            super().add_product(x, weight, last)
        else:
            self.parts = split_product(x.flatten(0, 1), weight, fixed_order=True)


class DeterministicBackend(TritonBackend):
    """Triton kernels with one order of summation per row. The others compute each row by itself already."""

    linear = staticmethod(linear)
    stream = staticmethod(DeterministicStream)
