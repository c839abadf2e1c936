"""The residual stream of a decoding pass, and the products that read it and add to it.

One token: matrix-vector kernels that add what ends a branch themselves. Up to MAX_ROWS tokens in half precision: skinny
products, where what ends a branch stays in parts until the next norm adds them. More: the library's products.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.kernels.decoding.skinny_product import MAX_ROWS, skinny_product, split_product
from longspec.kernels.decoding.vector_product import vector_product
from longspec.kernels.shared.elementwise import rms_norm, swiglu

LIBRARY_ROWS = 16
"""Above this many tokens the library's product is as fast where neither a gate nor a split is to be fused."""


class ResidualStream:
    """Hidden states [B, N, hidden] on their way through the layers; `hidden` is changed in place."""

    def __init__(self, hidden: Tensor, eps: float) -> None:
        """eps: that of every RMSNorm on the way."""
        self.hidden, self.eps = hidden, eps
        tokens = hidden.shape[0] * hidden.shape[1]
        self.is_vector = tokens == 1
        self.is_skinny = 1 < tokens <= MAX_ROWS and hidden.dtype in (torch.float16, torch.bfloat16)
        self.parts: Tensor | None = None

    def normed(self, norm: Tensor) -> Tensor:
        """RMSNorm of the stream with weight `norm`: [B, N, hidden]."""
        parts, self.parts = self.parts, None
        return rms_norm(self.hidden, norm, self.eps, parts)

    def project(self, norm: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """linear(RMSNorm(stream)): [B, N, out]."""
        return linear(self.normed(norm), weight, bias)

    def project_gated(self, norm: Tensor, weight: Tensor) -> Tensor:
        """silu(gate) · up of RMSNorm(stream); weight [2·I, hidden], gates first: [B, N, I]."""
        normed = self.normed(norm)
        if self.is_vector:
            return vector_product(normed, weight, gated=True)
        if self.is_skinny:
            return skinny_product(normed.flatten(0, 1), weight, gated=True).unflatten(0, normed.shape[:2])
        return swiglu(*F.linear(normed, weight).chunk(2, -1))

    def add(self, x: Tensor) -> None:
        """stream += x, [B, N, hidden] or, the same for all tokens of a row, [B, 1, hidden]."""
        self.hidden.add_(x)

    def add_product(self, x: Tensor, weight: Tensor, last: bool = False) -> None:
        """stream += x @ weight.T, x [B, N, in]; `last`: no norm follows, so `hidden` must hold it at once."""
        if self.is_vector:
            vector_product(x, weight, add_to=self.hidden)
        elif self.is_skinny and not last:
            self.parts = split_product(x.flatten(0, 1), weight)
        else:
            self.hidden.flatten(0, 1).addmm_(x.flatten(0, 1), weight.t())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, x contiguous [B, N, in]: [B, N, out], by the fastest way for so many tokens."""
    tokens = x.shape[0] * x.shape[1]
    if tokens == 1:
        return vector_product(x, weight, bias)
    many_rows = len(weight) >= 8 * x.shape[-1]  # lm_head
    if x.dtype in (torch.float16, torch.bfloat16) and tokens <= (MAX_ROWS if many_rows else LIBRARY_ROWS):
        return skinny_product(x.flatten(0, 1), weight, bias).unflatten(0, x.shape[:2])
    return F.linear(x, weight, bias)
