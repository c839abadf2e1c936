"""Tile sizes and split counts of the attention kernels, and the loads that they share.

A tile holds query rows of one KV head. Its rows are the pairs (node, query head of the group), so the heads of a group
read the keys once. Scores are in base 2, because exp2 is the exponential of the hardware; the LSE is written in natural
logarithm.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634
MOST_SPLITS = 32
"""Largest number of splits of the prefix. The tree attention kernel reads the results of all splits one by one, so more
splits cost it more than they save."""
MOST_PARTS = 64
"""Largest number of parts of a paged prefix, all of which a program merges in one tile."""
KEYS_PER_PART = 128
"""Smallest number of keys per part of a paged prefix that fills its capacity."""
LONG_CACHE = 16384
"""Number of cache slots from which on more splits pay off, because they fill the waves of programs evenly."""


class Tiles(NamedTuple):
    """Block sizes of a kernel, and how one program runs."""

    block_m: int
    """Query rows."""
    block_n: int
    """Keys."""
    num_warps: int
    num_stages: int

    def options(self, head_dim: int) -> dict[str, int]:
        """Keyword arguments of a launch."""
        sizes = {"HEAD_DIM": head_dim, "BLOCK_D": padded_dim(head_dim), "BLOCK_M": self.block_m}
        return sizes | {"BLOCK_N": self.block_n, "num_warps": self.num_warps, "num_stages": self.num_stages}


def padded_dim(head_dim: int) -> int:
    """head_dim rounded up to a power of two and to 16, the smallest size of a matrix product."""
    return max(triton.next_power_of_2(head_dim), 16)


def prefix_tiles(rows: int, head_dim: int, dtype: torch.dtype, shared_memory: int) -> Tiles:
    """Tiles of the prefix kernel.

    rows: query rows of a KV head. shared_memory: bytes available to a program. Tuned on an H200 in bf16 at head_dim
    128. fp32 runs without tensor cores, where small tiles cost nothing.
    """
    block_d = padded_dim(head_dim)
    if dtype == torch.float32 or block_d > 128:
        tiles = Tiles(16 if rows <= 16 else 32, 32, 4, 2)
    elif rows <= 16:
        tiles = Tiles(16, 64, 4, 4)
    elif rows <= 64:
        tiles = Tiles(64, 64, 4, 4)
    else:
        # Three stages let two programs share a multiprocessor: the softmax of one overlaps the products of the other.
        tiles = Tiles(64, 64, 4, 3)
    return fit_shared_memory(tiles, block_d * dtype.itemsize, shared_memory)


def tree_attention_tiles(head_dim: int, dtype: torch.dtype, shared_memory: int) -> Tiles:
    """Tiles of the tree attention kernel; tuned as `prefix_tiles`, and at head_dim 64.

    Few rows per program, so that many programs share the few keys and the reads of the prefix parts.
    """
    block_d = padded_dim(head_dim)
    if dtype == torch.float32 or block_d > 128:
        tiles = Tiles(16, 32, 4, 3)
    elif block_d <= 64:
        tiles = Tiles(16, 128, 8, 2)
    else:
        tiles = Tiles(16, 64, 4, 3)
    scratch = 4096  # for Triton's reductions and changes of layout
    return fit_shared_memory(tiles, block_d * dtype.itemsize, shared_memory - scratch)


def fit_shared_memory(tiles: Tiles, row_bytes: int, shared_memory: int) -> Tiles:
    """Reduce the stages, then the query rows, then the keys, until queries, keys and values fit."""
    while shared_bytes(tiles, row_bytes) > shared_memory:
        if tiles.num_stages > 2:
            tiles = tiles._replace(num_stages=tiles.num_stages - 1)
        elif tiles.block_m > 32:
            tiles = tiles._replace(block_m=tiles.block_m // 2, num_warps=max(tiles.num_warps // 2, 4))
        else:
            tiles = tiles._replace(block_n=tiles.block_n // 2)
    return tiles


def shared_bytes(tiles: Tiles, row_bytes: int) -> int:
    """Bytes of shared memory for the queries, keys and values of a program."""
    return (tiles.block_m + 2 * tiles.num_stages * tiles.block_n) * row_bytes


def programs_at_once(tiles: Tiles, head_dim: int, dtype: torch.dtype, shared_memory: int) -> int:
    """Number of programs that one multiprocessor runs at a time: 1 or 2 (more were not measured)."""
    reserved = 1024  # CUDA's own part of each program's shared memory
    needed = shared_bytes(tiles, padded_dim(head_dim) * dtype.itemsize) + reserved
    return min(2, max(1, shared_memory // needed))


def count_splits(programs: int, capacity: int, at_once: int) -> int:
    """Number of splits of the prefix. Arguments as in `_filling_splits`.

    A short cache gets one wave, because a further split costs the tree attention kernel 0.2 to 0.3 µs, and a further
    block of 64 keys in each split costs 0.6 to 0.7 µs: about sqrt(capacity / 16) splits are best. The tree attention
    kernel is compiled for each number of splits, so where the capacity is the limit, the number is a power of two.
    """
    # The power of two at or below sqrt(capacity / 16).
    worthwhile = 1 << (max(1, capacity // 16).bit_length() - 1) // 2
    return min(_filling_splits(programs, capacity, at_once), worthwhile, MOST_SPLITS)


def count_parts(programs: int, capacity: int, at_once: int) -> int:
    """Number of parts of a paged prefix and its tree. Arguments as in `_filling_splits`.

    A program merges all parts of a row at once and skips empty ones, so more parts pay off than splits.
    """
    return max(1, min(_filling_splits(programs, capacity, at_once), capacity // KEYS_PER_PART, MOST_PARTS))


def _filling_splits(programs: int, capacity: int, at_once: int) -> int:
    """Number of splits that fill the device: those of one wave or, for a long cache, of the number of waves, up to 4,
    that leaves the least of the device idle.

    programs: programs per split. capacity: cache slots. at_once: programs that the device runs at a time (a wave).
    """
    candidates = [max(1, waves * at_once // programs) for waves in range(1, 5)]
    if capacity < LONG_CACHE:
        return candidates[0]

    def idle_share(splits: int) -> float:
        waves = -(-splits * programs // at_once)
        return 1 - splits * programs / (waves * at_once)

    least_idle = min(candidates, key=idle_share)
    return next((splits for splits in candidates if idle_share(splits) < 0.05), least_idle)


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
    """First block of a split: floor(split * blocks / splits) without overflow. Shares differ by at most one block."""
    return blocks // splits * split + blocks % splits * split // splits


@triton.jit
def load_query_tile(q_ptr, stride_head, stride_node, row, dim, group, num_rows, HEAD_DIM: tl.constexpr):
    """Query rows of one KV head; row = node * group + head within the group."""
    offsets = (row // group).to(tl.int64) * stride_node + (row % group) * stride_head
    visible = (row < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(q_ptr + offsets[:, None] + dim[None, :], mask=visible, other=0.0)


@triton.jit
def load_block(ptr, offsets, dim, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """A whole block of keys or values; no slot needs a mask."""
    if HEAD_DIM == BLOCK_D:
        return tl.load(ptr + offsets)
    else:
        return tl.load(ptr + offsets, mask=(dim < HEAD_DIM)[None, :], other=0.0)


@triton.jit
def load_key_tile(ptr, stride_slot, slot, dim, is_read, HEAD_DIM: tl.constexpr):
    """Keys or values of slots [n] where `is_read`; others are never read and count as 0."""
    mask = is_read[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(ptr + slot.to(tl.int64)[:, None] * stride_slot + dim[None, :], mask=mask, other=0.0)
