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


class Tiles(NamedTuple):
    """Sizes of the prefix kernel's blocks (query rows, keys) and how a program runs."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    residents: int
    """Programs that one multiprocessor holds at a time."""


def padded_dim(head_dim: int) -> int:
    """head_dim as the kernels hold it: a power of two, as many as a matrix product needs at least."""
    return max(triton.next_power_of_2(head_dim), 16)


def prefix_tiles(rows: int, head_dim: int, dtype: torch.dtype, shared_memory: int) -> Tiles:
    """Blocks for `rows` query rows of a KV head, fitted to a multiprocessor's shared memory in bytes.

    Measured on an H200 at head_dim 128. fp32 runs without tensor cores, so small tiles cost nothing there.
    """
    block_d = padded_dim(head_dim)
    if dtype == torch.float32 or block_d > 128:
        tiles = Tiles(min(max(triton.next_power_of_2(rows), 16), 32), 32, 4, 2, 2)
    elif rows <= 16:
        tiles = Tiles(16, 64, 2, 3, 2)
    elif rows <= 32:
        tiles = Tiles(32, 64, 2, 3, 2)
    elif rows <= 64:
        tiles = Tiles(64, 64, 4, 3, 2)
    else:
        tiles = Tiles(128, 64, 8, 2, 2)
    return fit_shared_memory(tiles, block_d * dtype.itemsize, shared_memory)


def fit_shared_memory(tiles: Tiles, row_bytes: int, shared_memory: int) -> Tiles:
    """The tiles with fewer stages, then fewer rows, then fewer keys, until queries, keys and values fit."""
    while (tiles.block_m + 2 * tiles.num_stages * tiles.block_n) * row_bytes > shared_memory:
        if tiles.num_stages > 2:
            tiles = tiles._replace(num_stages=tiles.num_stages - 1)
        elif tiles.block_m > 32:
            tiles = tiles._replace(block_m=tiles.block_m // 2, num_warps=max(tiles.num_warps // 2, 4))
        else:
            tiles = tiles._replace(block_n=tiles.block_n // 2)
    return tiles


def check_layout(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError for tensors that the kernels would misread."""
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError("q, k and v need a contiguous last dimension")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(f"shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"dtypes differ: q {q.dtype}, k {k.dtype}, v {v.dtype}")


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


@triton.jit
def softmax_step(acc, row_max, row_sum, scores, v):
    """Fold one tile of base-2 scores (-inf = masked) and its values into the running softmax."""
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    # A row that has seen no key yet keeps its maximum at -inf, and -inf - -inf would be NaN.
    finite_max = tl.where(new_max == float("-inf"), 0.0, new_max)
    weights = tl.exp2(scores - finite_max[:, None])
    decay = tl.exp2(row_max - finite_max)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    acc = acc * decay[:, None] + tl.dot(weights.to(v.dtype), v, input_precision="ieee")
    return acc, new_max, row_sum
