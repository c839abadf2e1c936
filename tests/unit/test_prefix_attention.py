"""The kernels of prefixes, in a cache and paged, against their references, in Triton's interpreter and on the GPU."""

from typing import Any

import pytest
import torch
from kernel_devices import DEVICES, TOLERANCE
from torch import Tensor

pytest.importorskip("triton")

import attention_reference

from longspec.kernels.shared.attention import PagedPrefix, PagedTree
from longspec.kernels.triton.attention_tiles import prefix_tiles
from longspec.kernels.triton.paged_attention import paged_attention
from longspec.kernels.triton.prefix_attention import prefix_attention

HOPPER, AMPERE, CONSUMER = 227 * 1024, 163 * 1024, 99 * 1024
"""Bytes of shared memory that a program can use."""


def make_case(
    lengths: list[int], kv_heads: int, group: int, nodes: int, head_dim: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, lengths. k and v have different strides and hold NaN and inf after the length of each sequence."""
    generator = torch.Generator().manual_seed(sum(lengths) + nodes)
    batch, slots = len(lengths), max(lengths) + 70
    q = torch.randn(batch, nodes, kv_heads * group, head_dim, generator=generator).transpose(1, 2)
    k = torch.randn(batch, slots, kv_heads, head_dim, generator=generator).transpose(1, 2)
    v = torch.randn(batch, kv_heads, slots, head_dim + 16, generator=generator)[..., :head_dim]
    for row, length in enumerate(lengths):
        k[row, :, length:] = torch.nan
        v[row, :, length:] = torch.inf
    return q.to(dtype), k.to(dtype), v.to(dtype), torch.tensor(lengths)


def check(case: tuple[Tensor, ...], num_splits: int, device: str, scale: float = 0.2) -> None:
    q, k, v, lengths = (x.to(device) for x in case)
    tiles = prefix_tiles(q.shape[1] // k.shape[1] * q.shape[2], q.shape[3], q.dtype, HOPPER)
    inputs = (q, k, v, lengths, scale, num_splits, tiles)
    out, lse, block, _ = prefix_attention(*inputs)
    assert block == tiles.block_n
    expected_out, expected_lse, _, _ = attention_reference.prefix_attention(*inputs)
    tolerance = TOLERANCE[q.dtype]
    torch.testing.assert_close(out, expected_out, atol=tolerance, rtol=tolerance)
    torch.testing.assert_close(lse, expected_lse, atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("lengths", "kv_heads", "group", "nodes", "head_dim", "num_splits", "dtype"),
    [
        ([200, 0, 65], 2, 1, 1, 64, 3, torch.float32),
        ([129], 1, 4, 69, 64, 2, torch.float32),
        ([70, 20], 3, 4, 2, 32, 2, torch.float32),
        ([64, 1], 1, 5, 3, 128, 1, torch.float32),
        ([300, 7], 1, 8, 2, 80, 4, torch.float32),
        ([33], 1, 1, 69, 16, 2, torch.float32),
        ([0, 70], 1, 2, 3, 64, 5, torch.float32),  # 70 slots are two whole blocks of 32
        ([150, 90], 1, 4, 5, 64, 2, torch.float16),
    ],
)
def test_equals_the_reference_over_ragged_lengths(
    lengths: list[int],
    kv_heads: int,
    group: int,
    nodes: int,
    head_dim: int,
    num_splits: int,
    dtype: torch.dtype,
    device: str,
) -> None:
    """Each part by itself, with an output of 0 and an LSE of -inf for empty ones. Slots after the last whole block,
    where there are NaN and inf, have no effect."""
    check(make_case(lengths, kv_heads, group, nodes, head_dim, dtype), num_splits, device)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("nodes", [1, 69])
def test_every_dtype_and_group_and_a_long_prefix_on_the_gpu(nodes: int, dtype: torch.dtype) -> None:
    for head_dim, group in ((64, 8), (80, 1), (128, 4), (128, 5), (256, 2)):
        check(make_case([5000, 0, 1, 2113], 2, group, nodes, head_dim, dtype), 7, "cuda")
    check(make_case([32768, 32001], 8, 4, nodes, 128, dtype), 33, "cuda", scale=128**-0.5)


@pytest.mark.gpu
def test_offsets_past_two_to_the_31_on_the_gpu() -> None:
    """The second sequence of this cache starts after 2**31 elements."""
    store = torch.zeros(2, 1, 2**31 // 128 + 256, 128, dtype=torch.float16, device="cuda")
    small = make_case([100, 100], 1, 4, 5, 128, torch.float16)
    k, v = store, store.flip(0)
    for row in range(2):
        k[row, :, :100], v[row, :, :100] = small[1][row, :, :100].cuda(), small[2][row, :, :100].cuda()
    lengths = small[3].cuda()
    tiles = prefix_tiles(20, 128, torch.float16, HOPPER)
    got = prefix_attention(small[0].cuda(), k, v, lengths, 0.1, 2, tiles)
    expected = prefix_attention(*(x.cuda() for x in small[:3]), lengths, 0.1, 2, tiles)
    torch.testing.assert_close(got[:2], expected[:2])


@pytest.mark.parametrize("shared_memory", [HOPPER, AMPERE, CONSUMER])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
def test_tiles_fit_the_shared_memory_of_every_gpu(dtype: torch.dtype, head_dim: int, shared_memory: int) -> None:
    """The queries and all stages of keys and values, for any number of rows."""
    for rows in (1, 20, 64, 69, 276):
        tiles = prefix_tiles(rows, head_dim, dtype, shared_memory)
        slots = tiles.block_m + 2 * tiles.num_stages * tiles.block_n
        assert slots * head_dim * dtype.itemsize <= shared_memory and tiles.block_n >= 16


def paged_case(lengths: list[int], kv_heads: int, group: int, nodes: int, head_dim: int, has_tree: bool) -> list[Any]:
    """q, prefix, out and tree. Slots without order; NaN in those that no sequence has."""
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("lengths", "kv_heads", "group", "nodes", "head_dim", "num_parts", "has_tree"),
    [
        ([200, 1, 65], 1, 3, 2, 64, 4, False),
        ([0, 90], 2, 1, 2, 80, 2, False),
        ([150, 0], 2, 3, 3, 32, 3, True),
        ([40], 1, 1, 35, 128, 2, True),
    ],
)
def test_paged_attention_equals_the_reference(
    lengths: list[int],
    kv_heads: int,
    group: int,
    nodes: int,
    head_dim: int,
    num_parts: int,
    has_tree: bool,
    device: str,
) -> None:
    """Whole prefixes, of which some are empty, and trees of more than one block."""
    q, prefix, out, tree = paged_case(lengths, kv_heads, group, nodes, head_dim, has_tree)
    q, out, prefix = q.to(device), out.to(device), PagedPrefix(*(x.to(device) for x in prefix))
    tree = tree and PagedTree(*(x.to(device) for x in tree))
    tiles = prefix_tiles(group * nodes, head_dim, torch.float32, HOPPER)
    paged_attention(q, prefix, out, 0.2, num_parts, tiles, tree)
    expected = torch.zeros_like(out)
    attention_reference.paged_attention(q, prefix, expected, 0.2, num_parts, tiles, tree)
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=1e-5)
