"""Kernels whose result for a row is the same, bit for bit, whatever else a pass computes."""

from typing import Any

import attention_reference
import numpy as np
import pytest
import torch
from kernel_devices import random
from torch import Tensor

pytest.importorskip("triton")

from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from longspec.kernels.triton.deterministic import causal_attention, path_attention, root_paths
from longspec.kernels.triton.elementwise import rms_norm
from longspec.kernels.triton.skinny_product import skinny_product, split_product

pytestmark = pytest.mark.kernel

DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
"""The interpreter has no bf16 dot."""


@pytest.fixture(autouse=True)
def order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter's dot is numpy's, whose order of summation depends on the shape. In fp64 it makes no difference,
    because the result is rounded to fp32."""

    def create_dot(builder: InterpreterBuilder, a: Any, b: Any, d: Any, *further: Any) -> TensorHandle:
        product = np.matmul(a.data, b.data, dtype=np.float64)
        return TensorHandle(product.astype(d.data.dtype) + d.data, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)


def random_tree(nodes: int, device: str) -> Tensor:
    """visible [1, N, N]: each node's parent is one of the three before it, so that paths are long and differ."""
    generator = torch.Generator().manual_seed(nodes)
    visible = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        parent = int(torch.randint(max(0, node - 3), node, (1,), generator=generator))
        visible[node] |= visible[parent]
    return visible[None].to(device)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width"), [(70, 96), (200, 640), pytest.param(128, 576, marks=pytest.mark.gpu)])
def test_products_of_a_row_do_not_depend_on_the_other_rows(
    rows: int, width: int, dtype: torch.dtype, device: str
) -> None:
    """One row, each kind of tile, and several tiles."""
    x = random(300, width, dtype=dtype, device=device)
    weight = random(2 * rows, width, dtype=dtype, device=device, seed=1) / width**0.5
    bias = random(rows, dtype=dtype, device=device, seed=2)

    def products(x: Tensor) -> list[Tensor]:
        plain = skinny_product(x, weight[:rows], bias, fixed_order=True)
        return [plain, skinny_product(x, weight, None, True, True), *split_product(x, weight[:rows], True)]

    whole = products(x)
    expected = x.float() @ weight[:rows].float().t()
    torch.testing.assert_close(whole[0].float(), expected + bias.float(), rtol=0.02, atol=0.02)
    torch.testing.assert_close(sum(whole[2:]), expected, rtol=0.02, atol=0.02)
    for first, count in [(0, 1), (299, 1), (70, 1), (3, 17), (150, 40), (100, 69), (5, 81), (9, 200)]:
        own = slice(first, first + count)
        for got, all_rows in zip(products(x[own]), whole, strict=True):
            assert torch.equal(got, all_rows[own]), (first, count)


@pytest.mark.parametrize("dtype", DTYPES)
def test_norms_of_a_row_do_not_depend_on_the_other_rows(dtype: torch.dtype, device: str) -> None:
    some = slice(7, 60)
    x, weight = random(70, 576, dtype=dtype, device=device), random(576, dtype=dtype, device=device, seed=1)
    parts = random(3, 70, 576, dtype=torch.float32, device=device, seed=2)
    normed = rms_norm(x[some].clone(), weight, 1e-6, parts[:, some].contiguous())
    assert torch.equal(normed, rms_norm(x.clone(), weight, 1e-6, parts)[some])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("lengths", "kv_heads", "group", "nodes", "head_dim"),
    [
        ([70, 3], 2, 2, 9, 16),
        ([0, 63, 250], 1, 3, 22, 64),
        ([127], 1, 8, 12, 96),
        pytest.param([190, 64], 1, 1, 40, 128, marks=pytest.mark.gpu),
        ([4090], 1, 2, 9, 16),
    ],
)
def test_a_node_attends_like_one_token_after_its_path(
    lengths: list[int], kv_heads: int, group: int, nodes: int, head_dim: int, dtype: torch.dtype, device: str
) -> None:
    """As decoding one token and as prefill, with paths that end in a later block or split than the prefix."""
    shape = (len(lengths), kv_heads, max(lengths) + nodes + 70, head_dim)
    k, v = random(2, *shape, dtype=dtype, device=device)
    q = random(len(lengths), nodes, kv_heads * group, head_dim, dtype=dtype, device=device, seed=1).transpose(1, 2)
    paths = root_paths(random_tree(nodes, device).expand(len(lengths), -1, -1))
    scale, on_device = head_dim**-0.5, torch.tensor(lengths, dtype=torch.int32, device=device)
    got = path_attention(q, k, v, on_device, paths, scale)
    expected = attention_reference.path_attention(q, k, v, on_device, paths, scale)
    torch.testing.assert_close(got, expected, rtol=0.02, atol=0.004)

    for row, length in enumerate(lengths):
        for node in range(0, nodes, 1 if device == "cuda" else 4):
            depth, *path = paths[row, node].tolist()
            slots = [*range(length), *(length + number for number in path[: depth + 1])]
            # Later slots hold what earlier rounds left.
            keys, values = (torch.full_like(x[row, None], torch.nan) for x in (k, v))
            keys[:, :, : len(slots)], values[:, :, : len(slots)] = k[row, None][:, :, slots], v[row, None][:, :, slots]
            last = torch.tensor([len(slots) - 1], dtype=torch.int32, device=device)
            one = q[row, None, :, node, None]
            alone = path_attention(one, keys, values, last, None, scale)
            assert torch.equal(alone[0, :, 0], got[row, :, node]), (row, node)
            read = causal_attention(one, keys[:, :, : len(slots)], values[:, :, : len(slots)], scale)
            assert torch.equal(read[0, :, 0], got[row, :, node]), (row, node)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_chunks_of_a_prompt_do_not_change_its_attention(dtype: torch.dtype, device: str) -> None:
    k, v = random(2, 1, 2, 300, 64, dtype=dtype, device=device)
    q = random(1, 6, 300, 64, dtype=dtype, device=device, seed=1)
    whole = causal_attention(q, k, v, 0.125)
    expected = attention_reference.causal_attention(q, k, v, 0.125)
    torch.testing.assert_close(whole, expected, rtol=0.02, atol=0.004)
    for first, end in [(0, 5), (5, 255), (255, 257), (257, 300)]:
        chunk = causal_attention(q[:, :, first:end], k[:, :, :end], v[:, :, :end], 0.125)
        assert torch.equal(chunk, whole[:, :, first:end])
