"""The residual stream of a decoding pass, and the products that read it and add to it.

The number of tokens decides how products are computed:
- 1: matrix-vector kernels, which add the output of a branch to the stream themselves.
- up to MAX_ROWS in half precision: skinny products, which leave the output of a branch in parts for the next norm.
- more: the library's products.

If ranks share the target, a product that is added to the stream is summed over the ranks first.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from longspec.kernels.decoding.skinny_product import MAX_ROWS, skinny_product, split_product
from longspec.kernels.decoding.vector_product import vector_product
from longspec.kernels.shared.elementwise import rms_norm, swiglu
from longspec.models.parallel import model_parallel_rank_and_size, sum_over_ranks

LIBRARY_ROWS = 16
"""Number of tokens above which the library's product is as fast, if neither a gate nor a split is fused."""


class ResidualStream:
    """Hidden states [B, N, hidden] that the layers of a pass add to; `hidden` is changed in place."""

    def __init__(self, hidden: Tensor, eps: float) -> None:
        """eps: the epsilon of every RMSNorm in the pass."""
        self.hidden, self.eps = hidden, eps
        tokens = hidden.shape[0] * hidden.shape[1]
        self.is_shared = model_parallel_rank_and_size()[1] > 1
        """Whether a product added to the stream is a part of a sum over ranks."""
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
        """stream += x @ weight.T, x [B, N, in]. last: no norm follows, so the parts of the product are added now."""
        if self.is_shared:
            self.add(sum_over_ranks(linear(x, weight)))
        elif self.is_vector:
            vector_product(x, weight, add_to=self.hidden)
        elif self.is_skinny and not last:
            # The next norm adds the parts, which saves a launch.
            self.parts = split_product(x.flatten(0, 1), weight)
        else:
            self.hidden.flatten(0, 1).addmm_(x.flatten(0, 1), weight.t())


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x @ weight.T + bias, x contiguous [B, N, in]: [B, N, out], with the fastest product for this number of tokens."""
    tokens = x.shape[0] * x.shape[1]
    if tokens == 1:
        return vector_product(x, weight, bias)
    many_rows = len(weight) >= 8 * x.shape[-1]  # lm_head
    if x.dtype in (torch.float16, torch.bfloat16) and tokens <= (MAX_ROWS if many_rows else LIBRARY_ROWS):
        return skinny_product(x.flatten(0, 1), weight, bias).unflatten(0, x.shape[:2])
    return F.linear(x, weight, bias)
