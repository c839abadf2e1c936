"""The layers on CUDA.

The number of tokens decides how products are computed:
- 1: matrix-vector kernels, which add the output of a branch to the stream themselves, and normalize short vectors.
- up to MAX_ROWS in half precision: skinny products, which leave the output of a branch in parts for the next norm.
- more: the library's products.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.kernels.shared.residual import TokenSlots
from longspec.kernels.torch.layers import ResidualStream
from longspec.kernels.triton.elementwise import rms_norm, rotate_and_store, rotate_queries, swiglu
from longspec.kernels.triton.skinny_product import MAX_ROWS, skinny_product, split_product
from longspec.kernels.triton.vector_product import is_narrow, vector_product

LIBRARY_ROWS = 16
"""Number of tokens above which the library's product is as fast, if neither a gate nor a split is fused."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """See `Backend.linear`."""
    tokens = x.shape[0] * x.shape[1]
    if tokens == 1:
        return vector_product(x, weight, bias)
    many_rows = len(weight) >= 8 * x.shape[-1]  # lm_head
    if x.dtype in (torch.float16, torch.bfloat16) and tokens <= (MAX_ROWS if many_rows else LIBRARY_ROWS):
        return skinny_product(x.flatten(0, 1), weight, bias).unflatten(0, x.shape[:2])
    return F.linear(x, weight, bias)


class TritonStream(ResidualStream):
    """One kernel between two products."""

    linear = staticmethod(linear)
    rotate_and_store = staticmethod(rotate_and_store)

    def __init__(self, hidden: Tensor, eps: float) -> None:
        super().__init__(hidden, eps)
        tokens = hidden.shape[0] * hidden.shape[1]
        self.is_vector = tokens == 1
        self.is_skinny = 1 < tokens <= MAX_ROWS and hidden.dtype in (torch.float16, torch.bfloat16)
        self.parts: Tensor | None = None

    def current(self) -> Tensor:
        if self.parts is None:
            return super().current()
        return (self.hidden + self.parts.sum(0).view_as(self.hidden)).to(self.hidden.dtype)

    def normed(self, norm: Tensor) -> Tensor:
        parts, self.parts = self.parts, None
        return rms_norm(self.hidden, norm, self.eps, parts)

    def project(self, norm: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if self.is_vector and is_narrow(weight.shape[1]):
            return vector_product(self.hidden, weight, bias, norm=norm, eps=self.eps)
        return super().project(norm, weight, bias)

    def project_gated(self, norm: Tensor, weight: Tensor) -> Tensor:
        if self.is_vector and is_narrow(weight.shape[1]):
            return vector_product(self.hidden, weight, gated=True, norm=norm, eps=self.eps)
        normed = self.normed(norm)
        if self.is_vector:
            return vector_product(normed, weight, gated=True)
        if self.is_skinny:
            return skinny_product(normed.flatten(0, 1), weight, gated=True).unflatten(0, normed.shape[:2])
        return swiglu(*F.linear(normed, weight).chunk(2, -1))

    def add_product(self, x: Tensor, weight: Tensor, last: bool = False) -> None:
        if self.is_vector:
            vector_product(x, weight, add_to=self.hidden)
        elif self.is_skinny and not last:
            # The next norm adds the parts, which saves a launch.
            self.parts = split_product(x.flatten(0, 1), weight)
        else:
            self.hidden.flatten(0, 1).addmm_(x.flatten(0, 1), weight.t())

    def rotate(self, q: Tensor, slots: TokenSlots) -> Tensor:
        return rotate_queries(q, slots.positions, slots.rope, slots.keys.shape[3])
