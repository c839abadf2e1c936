"""What the attention kernels share: tile sizes, and the steps of online softmax over one tile of query rows.

A tile's rows are the (query head of the group, node) pairs of one KV head, so that a group reads its keys once.
Scores are kept in base 2 (exp2 is the hardware's own exponential); the LSE is written in natural log.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

LOG2_E = 1.4426950408889634


class Tiles(NamedTuple):
    """Sizes of a kernel's blocks: query rows, keys, and head_dim padded to a power of two."""

    block_m: int
    block_n: int
    block_d: int


def tile_sizes(rows: int, head_dim: int, dtype: torch.dtype) -> Tiles:
    """Blocks that fit in shared memory for the dtype; fp32 tiles take twice the bytes and no tensor cores."""
    widest_m, block_n = (32, 32) if dtype == torch.float32 or head_dim > 128 else (64, 64)
    block_m = min(max(triton.next_power_of_2(rows), 16), widest_m)
    return Tiles(block_m, block_n, max(triton.next_power_of_2(head_dim), 16))


def check_layout(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raise ValueError for tensors that the kernels would misread."""
    if q.stride(-1) != 1 or k.stride(-1) != 1 or v.stride(-1) != 1:
        raise ValueError("q, k and v need a contiguous last dimension")
    if k.shape != v.shape or q.shape[0] != k.shape[0] or q.shape[3] != k.shape[3] or q.shape[1] % k.shape[1]:
        raise ValueError(f"shapes do not fit: q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}")
    if not q.dtype == k.dtype == v.dtype:
        raise ValueError(f"dtypes differ: q {q.dtype}, k {k.dtype}, v {v.dtype}")


@triton.jit
def load_query_tile(q_ptr, stride_head, stride_node, row, dim, nodes, num_rows, HEAD_DIM: tl.constexpr):
    """Rows of a KV head's queries; row = head within the group * nodes + node."""
    offsets = (row // nodes).to(tl.int64) * stride_head + (row % nodes).to(tl.int64) * stride_node
    visible = (row < num_rows)[:, None] & (dim < HEAD_DIM)[None, :]
    return tl.load(q_ptr + offsets[:, None] + dim[None, :], mask=visible, other=0.0)


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


@triton.jit
def store_state(out_ptr, lse_ptr, acc, row_max, row_sum, row, dim, num_rows, HEAD_DIM: tl.constexpr):
    """Normalise and write the rows of one tile to contiguous [rows, head_dim] and [rows]."""
    LN_2: tl.constexpr = 0.6931471805599453
    divisor = tl.where(row_sum > 0.0, row_sum, 1.0)
    lse = (row_max + tl.log2(divisor)) * LN_2
    written = row < num_rows
    tl.store(lse_ptr + row, lse, mask=written)
    offsets = row.to(tl.int64)[:, None] * HEAD_DIM + dim[None, :]
    tl.store(out_ptr + offsets, acc / divisor[:, None], mask=written[:, None] & (dim < HEAD_DIM)[None, :])
