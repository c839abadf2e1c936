"""Sizes of the prefix kernel, and attention to paged prefixes against its reference."""

import os
import subprocess
import sys
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from kernel_devices import DEVICES, TOLERANCE, random
from torch import Tensor

pytest.importorskip("triton")

import attention_reference

from longspec.kernels.shared.attention import PagedPrefix, PagedTree
from longspec.kernels.triton.attention_tiles import count_parts, prefix_tiles, programs_at_once
from longspec.kernels.triton.paged_attention import paged_attention
from longspec.kernels.triton.prefix_attention import prefix_attention

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


@pytest.mark.parametrize(
    ("device", "dtype"),
    [
        pytest.param(*device.values, dtype, marks=device.marks)
        for device, dtype in product(DEVICES, TOLERANCE)
        if (device.values, dtype) != (("cpu",), torch.bfloat16)  # the interpreter has no bf16
    ],
)
@pytest.mark.parametrize(
    ("lengths", "kv_heads", "group", "nodes", "head_dim", "num_parts", "has_tree"),
    [
        ([200, 1, 65], 1, 3, 2, 64, 4, False),
        ([0, 90], 2, 1, 2, 80, 2, False),
        ([0, 1, 31, 32, 33, 63, 64, 65, 128], 2, 2, 3, 32, 3, True),
        ([150, 0], 2, 3, 3, 32, 3, True),
        ([40], 1, 1, 35, 128, 2, True),
        ([130], 1, 1, 70, 64, 1, True),
        ([70, 3], 1, 6, 32, 16, 9, True),
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
    dtype: torch.dtype,
) -> None:
    """Whole prefixes, of which some are empty, and trees of more than one block, in one part and in many."""
    q, prefix, out, tree = paged_case(lengths, kv_heads, group, nodes, head_dim, has_tree)
    q, out = q.to(device, dtype), out.to(device, dtype)
    prefix = PagedPrefix(*(x.to(device, dtype) for x in prefix[:2]), *(x.to(device) for x in prefix[2:]))
    tree = tree and PagedTree(*(x.to(device, dtype) for x in tree[:2]), *(x.to(device) for x in tree[2:]))
    tiles = prefix_tiles(group * nodes, head_dim, dtype, HOPPER)
    paged_attention(q, prefix, out, 0.2, num_parts, tiles, tree)
    expected = torch.zeros_like(out)
    attention_reference.paged_attention(q, prefix, expected, 0.2, tree)
    torch.testing.assert_close(out, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
