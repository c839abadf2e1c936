"""Kernels whose result for a row is the same bits whatever else a pass computes, paged attention, one interface."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import attention_reference
import numpy as np
import pytest
import torch
from kernel_devices import TOLERANCE, random
from torch import Tensor
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

pytest.importorskip("triton")

from longspec.kernels.shared.attention import PagedPrefix, PagedTree
from longspec.kernels.triton.attention_tiles import count_parts, prefix_tiles, programs_at_once
from longspec.kernels.triton.deterministic import causal_attention, path_attention, root_paths
from longspec.kernels.triton.elementwise import rms_norm
from longspec.kernels.triton.paged_attention import paged_attention
from longspec.kernels.triton.prefix_attention import prefix_attention
from longspec.kernels.triton.skinny_product import skinny_product, split_product

pytestmark = pytest.mark.kernel

DTYPES = [torch.float16, pytest.param(torch.bfloat16, marks=pytest.mark.gpu)]
"""The interpreter has no bf16 dot."""


@pytest.fixture(autouse=True)
def order_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    """The order of sums in numpy's dot depends on the shape, which makes no difference in fp64 rounded to fp32."""

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
def test_products_of_a_row_do_not_depend_on_other_rows(rows: int, width: int, dtype: torch.dtype, device: str) -> None:
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


Heads = tuple[int, int, int, int]
"""KV heads, query heads per KV head, nodes and head_dim."""
HOPPER, AMPERE, CONSUMER = 227 * 1024, 163 * 1024, 99 * 1024
"""Bytes of shared memory that a program can use."""


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_on_the_gpu() -> None:
    """The second sequence of this cache starts after 2**31 elements."""
    store = torch.zeros(2, 1, 2**31 // 128 + 256, 128, dtype=torch.float16, device="cuda")
    q, small = random(2, 4, 5, 128).half().cuda(), random(2, 2, 1, 170, 128, seed=1).half().cuda()
    k, v = store, store.flip(0)
    k[:, :, :100], v[:, :, :100] = small[:, :, :, :100]
    rest = (torch.tensor([100, 100], device="cuda"), 0.1, 2, prefix_tiles(20, 128, torch.float16, HOPPER))
    torch.testing.assert_close(prefix_attention(q, k, v, *rest)[:2], prefix_attention(q, *small, *rest)[:2])


@pytest.mark.parametrize("shared_memory", [HOPPER, AMPERE, CONSUMER])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_tiles_fit_the_shared_memory_of_every_gpu(dtype: torch.dtype, head_dim: int, shared_memory: int) -> None:
    """The queries and all stages of keys and values, for any number of rows."""
    for rows in (1, 20, 64, 69, 276):
        tiles = prefix_tiles(rows, head_dim, dtype, shared_memory)
        slots = tiles.block_m + 2 * tiles.num_stages * tiles.block_n
        assert slots * head_dim * dtype.itemsize <= shared_memory and tiles.block_n >= 16


def test_paged_parts_share_multiprocessors_as_planned() -> None:
    """The 32 nodes of SGLang's default tree with 6 query heads per KV head: two programs run on each of an H200's
    multiprocessors only if Triton takes no more shared memory than planned, and the parts of a prefix fill both."""
    tiles = prefix_tiles(192, 128, torch.bfloat16, HOPPER)
    run = [sys.executable, str(Path(__file__).parents[1] / "compile_paged.py"), *map(str, (*tiles, 128))]
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    used = int(subprocess.run(run, env=environment, check=True, capture_output=True, text=True).stdout)
    assert programs_at_once(tiles, 128, torch.bfloat16, HOPPER) == 2 == (HOPPER + 1024) // (used + 1024)
    assert [count_parts(6, capacity, 2 * 132) for capacity in (64, 2048, 32768)] == [1, 16, 44]


def paged_case(lengths: list[int], shape: Heads, has_tree: bool) -> list[Any]:
    """q, prefix, out and tree. Slots without order; NaN in those that no sequence has."""
    kv_heads, group, nodes, head_dim = shape
    generator = torch.Generator().manual_seed(sum(lengths) + nodes)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    batch, total = len(lengths), sum(lengths)
    q = normal(batch, nodes, kv_heads * group, head_dim).transpose(1, 2)
    slots = torch.randperm(2 * total + 4, generator=generator)[: total + 3].int()
    pools = [torch.full((2 * total + 4, kv_heads, head_dim), torch.nan) for _ in range(2)]
    begins = torch.tensor([3 + sum(lengths[:row]) for row in range(batch)])
    for pool in pools:
        pool[slots[3:].long()] = normal(total, kv_heads, head_dim)
    tree = None
    if has_tree:
        shapes = [(nodes, length + nodes) for length in lengths]
        masks = [torch.rand(shape, generator=generator) < 0.5 for shape in shapes]
        for mask, length in zip(masks, lengths, strict=True):
            mask[:, length:] |= torch.eye(nodes, dtype=torch.bool)
        starts = torch.tensor([7 + sum(mask.numel() for mask in masks[:row]) for row in range(batch)])
        flat = torch.cat([torch.zeros(7, dtype=torch.bool), *(mask.flatten() for mask in masks)])
        keys, values = normal(2, batch * nodes, kv_heads, head_dim)
        tree = PagedTree(keys, values, flat, starts)
    prefix = PagedPrefix(*pools, slots, begins, begins + torch.tensor(lengths))
    return [q, prefix, torch.full_like(q.transpose(1, 2), 7.0), tree]


@pytest.mark.parametrize("dtype", [torch.float32, *DTYPES])
@pytest.mark.parametrize(
    ("lengths", "shape", "num_parts", "has_tree"),
    [
        ([200, 1, 65], (1, 3, 2, 64), 4, False),
        ([0, 90], (2, 1, 2, 80), 2, False),
        ([0, 1, 31, 32, 33, 63, 64, 65, 128], (2, 2, 3, 32), 3, True),
        ([150, 0], (2, 3, 3, 32), 3, True),
        ([40], (1, 1, 35, 128), 2, True),
        ([130], (1, 1, 70, 64), 1, True),
        ([70, 3], (1, 6, 32, 16), 9, True),
    ],
)
def test_paged_attention_equals_the_reference(
    lengths: list[int], shape: Heads, num_parts: int, has_tree: bool, device: str, dtype: torch.dtype
) -> None:
    """Whole prefixes, of which some are empty, and trees of more than one block, in one part and in many."""
    q, prefix, out, tree = paged_case(lengths, shape, has_tree)
    q, out = q.to(device, dtype), out.to(device, dtype)
    prefix = PagedPrefix(*(x.to(device, dtype) for x in prefix[:2]), *(x.to(device) for x in prefix[2:]))
    tree = tree and PagedTree(*(x.to(device, dtype) for x in tree[:2]), *(x.to(device) for x in tree[2:]))
    tiles = prefix_tiles(shape[1] * shape[2], shape[3], dtype, HOPPER)
    paged_attention(q, prefix, out, 0.2, num_parts, tiles, tree)
    expected = torch.zeros_like(out)
    attention_reference.paged_attention(q, prefix, expected, 0.2, tree)
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
