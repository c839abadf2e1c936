"""Plain torch references of the matrix products of few rows, with their signatures, computed in fp64."""

import torch
import torch.nn.functional as F
from layer_reference import rms_norm
from torch import Tensor

from longspec.kernels.shared.device import describe_gpu
from longspec.kernels.triton.skinny_product import count_parts


def vector_product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gated: bool = False,
    add_to: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    if norm is not None:
        x = rms_norm(x, norm, eps)
    product = _product(x, weight, bias, gated)
    return product.to(x.dtype) if add_to is None else add_to.copy_(add_to + product)


def skinny_product(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, gated: bool = False, fixed_order: bool = False
) -> Tensor:
    return _product(x, weight, bias, gated).to(x.dtype)


def split_product(x: Tensor, weight: Tensor, fixed_order: bool = False) -> Tensor:
    """Reference of `skinny_product.split_product`; where the columns are split is not part of the contract."""
    rows, width = weight.shape
    parts = count_parts(rows, width, describe_gpu(x.device).multiprocessors)
    shares = zip(x.tensor_split(parts, -1), weight.tensor_split(parts, -1), strict=True)
    return torch.stack([_product(x_part, weight_part, None, False) for x_part, weight_part in shares]).float()


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, gated: bool) -> Tensor:
    product = x.double() @ weight.double().T
    if bias is not None:
        product += bias.double()
    if not gated:
        return product
    gate, up = product.chunk(2, -1)
    return F.silu(gate) * up
