"""Attention to a paged prefix and to a tree after it: split-KV flash decoding over a list of slots, then a merge.

Each program takes one share of a sequence's keys, so the time of a long prefix does not depend on the number of
sequences. Grids follow from shapes alone and lengths stay on the device, so a CUDA graph may capture both
launches and replay them at other lengths.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.shared.attention import PagedPrefix, PagedTree
from longspec.kernels.shared.device import describe_gpu
from longspec.kernels.triton.attention_tiles import (
    LOG2_E,
    Tiles,
    load_block,
    load_key_tile,
    load_query_tile,
    share_begin,
)
from longspec.kernels.triton.online_softmax import finite
from longspec.kernels.triton.overlap import overlap_options
from longspec.kernels.triton.prefix_attention import part_row

MERGE_WARPS = 2


# One step of online softmax over a block of keys and values [BLOCK_N, D], in base 2:
#   scores = scale * q . k + bias;  m' = max(m, max scores)
#   sum = sum * 2^(m - m') + sum 2^(scores - m');  acc likewise
# bias [BLOCK_M or 1, BLOCK_N]: 0 where a key is visible, else -inf.
@triton.jit
def attend_to_block(q, k, v, bias, row_max, row_sum, acc, scale_log2):
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2 + bias
    new_max = tl.maximum(row_max, tl.max(scores, 1))
    finite_max = finite(new_max)
    weights = tl.exp2(scores - finite_max[:, None])
    decay = tl.exp2(row_max - finite_max)
    row_sum = row_sum * decay + tl.sum(weights, 1)
    acc = tl.dot(weights.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return new_max, row_sum, acc


# The slots of positions; past the end that of the last one, so that keys and values need no mask.
@triton.jit
def _load_slots(slots_ptr, position, length):
    index = tl.minimum(position, length - 1)
    return tl.load(slots_ptr + index, mask=index >= 0, other=0).to(tl.int64)


# For a query q and the keys k_j and values v_j of part p:
#   lse_p = log2 sum_j 2^(scale * q . k_j);  out_p = sum_j 2^(scale * q . k_j - lse_p) * v_j
# The parts are equal shares of the blocks of the prefix and then of the tree, which is under its mask.
# One program takes BLOCK_M query rows of one KV head and one part. The kernel is compiled once for all batches.
@triton.jit(do_not_specialize=["kv_heads", "group", "num_rows", "nodes"])
def _paged_parts_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    slots_ptr,
    begins_ptr,
    ends_ptr,
    node_keys_ptr,
    node_values_ptr,
    mask_ptr,
    mask_starts_ptr,
    out_ptr,
    lse_ptr,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_ks,
    stride_kh,
    stride_vs,
    stride_vh,
    stride_nks,
    stride_nkh,
    stride_nvs,
    stride_nvh,
    scale_log2,
    kv_heads,
    group,
    num_rows,
    nodes,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_launch_dependents()
    # Grid: tiles of query rows, parts, sequences x KV heads.
    part = tl.program_id(1)
    batch = (tl.program_id(2) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(2) % kv_heads).to(tl.int64)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    in_rows = row < num_rows
    begin = tl.load(begins_ptr + batch).to(tl.int64)
    length = (tl.load(ends_ptr + batch) - begin).to(tl.int32)
    prefix_blocks = tl.cdiv(length, BLOCK_N)
    blocks = prefix_blocks + tl.cdiv(nodes, BLOCK_N)
    first = share_begin(blocks, part, tl.num_programs(1))
    last = share_begin(blocks, part + 1, tl.num_programs(1))
    q_base = q_ptr + batch * stride_qb + kv_head * group * stride_qh
    q = load_query_tile(q_base, stride_qh, stride_qn, row, dim, group, num_rows, HEAD_DIM)

    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    key = tl.arange(0, BLOCK_N)
    # Slots are loaded one block ahead. If a block's slots and keys were loaded in one iteration, Triton would load the
    # keys after the products of the block before, not during them.
    slot = _load_slots(slots_ptr + begin, first * BLOCK_N + key, length)
    for block in range(first, tl.minimum(last, prefix_blocks)):
        position = block * BLOCK_N + key
        k = load_block(k_ptr + kv_head * stride_kh, slot[:, None] * stride_ks + dim[None, :], dim, HEAD_DIM, BLOCK_D)
        v = load_block(v_ptr + kv_head * stride_vh, slot[:, None] * stride_vs + dim[None, :], dim, HEAD_DIM, BLOCK_D)
        slot = _load_slots(slots_ptr + begin, position + BLOCK_N, length)
        bias = tl.where(position < length, 0.0, float("-inf"))[None, :]
        row_max, row_sum, acc = attend_to_block(q, k, v, bias, row_max, row_sum, acc, scale_log2)

    mask_row = tl.load(mask_starts_ptr + batch).to(tl.int64) + (row // group).to(tl.int64) * (length + nodes) + length
    # A tree has few blocks. With the mask, three stages would leave no shared memory for a second program.
    for block in tl.range(tl.maximum(first, prefix_blocks), last, num_stages=2):
        node = (block - prefix_blocks) * BLOCK_N + key
        exists = node < nodes
        entry = batch * nodes + node
        k = load_key_tile(node_keys_ptr + kv_head * stride_nkh, stride_nks, entry, dim, exists, HEAD_DIM)
        v = load_key_tile(node_values_ptr + kv_head * stride_nvh, stride_nvs, entry, dim, exists, HEAD_DIM)
        in_mask = in_rows[:, None] & exists[None, :]
        visible = tl.load(mask_ptr + mask_row[:, None] + node[None, :], mask=in_mask, other=0) != 0
        bias = tl.where(visible, 0.0, float("-inf"))
        row_max, row_sum, acc = attend_to_block(q, k, v, bias, row_max, row_sum, acc, scale_log2)

    rows_out = part_row(part, batch, tl.num_programs(2) // kv_heads, row, num_rows, kv_head, kv_heads, group)
    # A row that sees no key of the part has the LSE -inf, and its output is not read.
    sees_key = row_sum > 0.0
    divisor = tl.where(sees_key, row_sum, 1.0)
    tl.store(lse_ptr + rows_out, row_max + tl.log2(divisor), mask=in_rows)
    in_tile = (in_rows & sees_key)[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(out_ptr + rows_out[:, None] * HEAD_DIM + dim[None, :], acc / divisor[:, None], mask=in_tile)


# out = sum_p 2^(lse_p - m) * out_p / sum_p 2^(lse_p - m), m = max_p lse_p. One program takes one query row.
@triton.jit(do_not_specialize=["rows", "parts"])
def _merge_parts_kernel(
    parts_ptr,
    lse_ptr,
    out_ptr,
    rows,
    parts,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    part = tl.arange(0, BLOCK_P)
    dim = tl.arange(0, BLOCK_D)
    lse = tl.load(lse_ptr + part.to(tl.int64) * rows + row, mask=part < parts, other=float("-inf"))
    weight = tl.exp2(lse - finite(tl.max(lse, 0)))
    total = tl.sum(weight, 0)
    # Parts without a key are not read.
    is_read = (weight > 0.0)[:, None] & (dim < HEAD_DIM)[None, :]
    entry = (part.to(tl.int64) * rows + row)[:, None] * HEAD_DIM + dim[None, :]
    out = tl.sum(tl.load(parts_ptr + entry, mask=is_read, other=0.0) * weight[:, None], 0)
    # A query that saw no key gets 0.
    out = out / tl.where(total > 0.0, total, 1.0)
    tl.store(out_ptr + row * HEAD_DIM + dim, out, mask=dim < HEAD_DIM)


def paged_attention(
    q: Tensor,
    prefix: PagedPrefix,
    out: Tensor,
    scale: float,
    num_parts: int,
    tiles: Tiles,
    tree: PagedTree | None = None,
) -> None:
    """Attention of each query to the whole prefix of its sequence, and under a mask to the tree after it.

    q [B, H, N, D]: contiguous last dimension, in the dtype of all keys and values (fp32, fp16, bf16). out: contiguous
    [B, N, H, D] in this dtype, overwritten; a query that sees no key gets 0. scale > 0. num_parts: number of equal
    shares of prefix and tree.
    """
    batch, heads, nodes, head_dim = q.shape
    kv_heads = prefix.keys.shape[1]
    group = heads // kv_heads
    # The kernel before is not ours, so only the merge may start before the parts have ended, and waits for them.
    overlaps = describe_gpu(q.device).overlaps
    # In fp32, because rounding the parts would add to the error of their merge.
    outs = torch.empty((num_parts, batch, nodes, heads, head_dim), dtype=torch.float32, device=q.device)
    lses = torch.empty(outs.shape[:-1], dtype=torch.float32, device=q.device)
    # Without a tree, its arguments are those of the prefix. The mask is one of bytes in any case: loads of wider
    # entries, even if none runs, would take the shared memory of several stages.
    k, v, slots, begins, ends = prefix
    node_keys, node_values, mask, mask_starts = (k, v, slots, begins) if tree is None else tree
    _paged_parts_kernel[(triton.cdiv(group * nodes, tiles.block_m), num_parts, batch * kv_heads)](
        *(q, k, v, slots, begins, ends),
        *(node_keys, node_values, mask.view(torch.uint8), mask_starts, outs, lses),
        *(*q.stride()[:3], *k.stride()[:2], *v.stride()[:2], *node_keys.stride()[:2], *node_values.stride()[:2]),
        *(scale * LOG2_E, kv_heads, group, group * nodes, 0 if tree is None else nodes),
        **tiles.options(head_dim),
        OVERLAP=overlaps,
    )
    _merge_parts_kernel[(batch * nodes * heads,)](
        *(outs, lses, out, batch * nodes * heads, num_parts),
        HEAD_DIM=head_dim,
        BLOCK_P=triton.next_power_of_2(num_parts),
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=MERGE_WARPS,
        **overlap_options(overlaps),
    )
