"""What the attention kernels share: tile sizes, and the steps of online softmax over one tile of query rows.

A tile's rows are the (node, query head of the group) pairs of one KV head, so that a group reads its keys once.
Scores are kept in base 2 (exp2 is the hardware's own exponential); the LSE is written in natural log.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
MOST_SPLITS = 32
"""The finishing kernel reads split after split: more cost it more than they save."""
LONG_CACHE = 16384
"""From this many cache slots on, work that is evenly spread is worth more splits."""


class Tiles(NamedTuple):
    """Sizes of a kernel's blocks (query rows, keys) and how a program runs."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def padded_dim(head_dim: int) -> int:
    """head_dim as the kernels hold it: a power of two, as many as a matrix product needs at least."""
    return max(triton.next_power_of_2(head_dim), 16)


def prefix_tiles(rows: int, head_dim: int, dtype: torch.dtype, shared_memory: int) -> Tiles:
    """Blocks for `rows` query rows of a KV head, fitted to a program's shared memory in bytes.

    Measured on an H200 in bf16 at head_dim 128; fp32 runs without tensor cores, where small tiles cost nothing.
    """
    block_d = padded_dim(head_dim)
    if dtype == torch.float32 or block_d > 128:
        tiles = Tiles(16 if rows <= 16 else 32, 32, 4, 2)
    elif rows <= 16:
        tiles = Tiles(16, 64, 4, 4)
    elif rows <= 64:
        tiles = Tiles(64, 64, 4, 4)
    else:  # two programs share a multiprocessor: one's softmax runs beside the other's products
        tiles = Tiles(64, 64, 4, 3)
    return fit_shared_memory(tiles, block_d * dtype.itemsize, shared_memory)


def tree_attention_tiles(head_dim: int, dtype: torch.dtype, shared_memory: int) -> Tiles:
    """Blocks of the finishing kernel: few rows, so that many programs share its few keys and its reads of the parts.

    Measured as `prefix_tiles`, and at head_dim 64.
    """
    block_d = padded_dim(head_dim)
    if dtype == torch.float32 or block_d > 128:
        tiles = Tiles(16, 32, 4, 3)
    else:
        tiles = Tiles(16, 128, 8, 2) if block_d <= 64 else Tiles(16, 64, 4, 3)
    scratch = 4096
    return fit_shared_memory(tiles, block_d * dtype.itemsize, shared_memory - scratch)


def fit_shared_memory(tiles: Tiles, row_bytes: int, shared_memory: int) -> Tiles:
    """The tiles with fewer stages, then fewer rows, then fewer keys, until queries, keys and values fit."""
    while shared_bytes(tiles, row_bytes) > shared_memory:
        if tiles.num_stages > 2:
            tiles = tiles._replace(num_stages=tiles.num_stages - 1)
        elif tiles.block_m > 32:
            tiles = tiles._replace(block_m=tiles.block_m // 2, num_warps=max(tiles.num_warps // 2, 4))
        else:
            tiles = tiles._replace(block_n=tiles.block_n // 2)
    return tiles


def shared_bytes(tiles: Tiles, row_bytes: int) -> int:
    """Of shared memory, for a program's queries, keys and values."""
    return (tiles.block_m + 2 * tiles.num_stages * tiles.block_n) * row_bytes


def programs_at_once(tiles: Tiles, head_dim: int, dtype: torch.dtype, shared_memory: int) -> int:
    """How many programs one multiprocessor runs at a time, at most 2: more were not measured."""
    reserved = 1024
    needed = shared_bytes(tiles, padded_dim(head_dim) * dtype.itemsize) + reserved
    return min(2, max(1, shared_memory // needed))


def count_splits(programs: int, capacity: int, places: int) -> int:
    """Splits of the prefix for `programs` programs a split, of which `places` run at a time: waves that fill them.

    Only a long cache is worth more than one wave. A split more costs the finishing kernel 0.2 to 0.3 µs, a block of 64
    keys more in every split 0.6 to 0.7 µs: in a short cache some sqrt(capacity / 16) are best. The finishing kernel is
    compiled for each number of splits, so where the cache's size is what limits them, they are a power of two.
    """
    candidates = [max(1, waves * places // programs) for waves in range(1, 5)]

    def idle_share(splits: int) -> float:
        waves = -(-splits * programs // places)
        return 1 - splits * programs / (waves * places)

    best = next((splits for splits in candidates if idle_share(splits) < 0.05), min(candidates, key=idle_share))
    wanted = candidates[0] if capacity < LONG_CACHE else best
    worth = 1 << (max(1, capacity // 16).bit_length() - 1) // 2
    return min(wanted, worth, MOST_SPLITS)


def check_layout(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError for tensors that the kernels would misread."""
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError("q, k and v need a contiguous last dimension")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(f"shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"dtypes differ: q {q.dtype}, k {k.dtype}, v {v.dtype}")


@triton.jit
def share_begin(blocks, split, splits):
    """First block of a split's share, floor(split * blocks / splits): shares differ by one block at most."""
    return blocks // splits * split + blocks % splits * split // splits


@triton.jit
def load_query_tile(q_ptr, stride_head, stride_node, row, dim, group, num_rows, HEAD_DIM: tl.constexpr):
    """Rows of a KV head's queries; row = node * group + head within the group."""
    offsets = (row // group).to(tl.int64) * stride_node + (row % group) * stride_head
    visible = (row < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(q_ptr + offsets[:, None] + dim[None, :], mask=visible, other=0.0)


@triton.jit
def load_block(ptr, offsets, dim, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """A whole block of keys or values: no slot needs a mask."""
    if HEAD_DIM == BLOCK_D:
        return tl.load(ptr + offsets)
    else:
        return tl.load(ptr + offsets, mask=(dim < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def load_key_tile(ptr, stride_slot, slot, dim, end, HEAD_DIM: tl.constexpr):
    """Keys or values of the slots before `end`; whatever lies in later slots is never read."""
    visible = (slot < end)[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(ptr + slot.to(tl.int64)[:, None] * stride_slot + dim[None, :], mask=visible, other=0.0)
