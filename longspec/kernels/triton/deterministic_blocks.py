"""The kernels of `deterministic`: blocks of keys, and splits of blocks, at absolute positions.

Query rows are the narrow side of all matrix products, so that the number of rows changes no sum. Multiplications and
additions are not fused, because compilers choose differently in different kernels.
"""

import triton
import triton.language as tl

from longspec.kernels.triton.attention_tiles import load_key_tile, load_query_tile
from longspec.kernels.triton.online_softmax import finite


# Splits have 256 keys up to position 4096, 1024 up to 32768, and 4096 from there on: short ones keep the device busy
# where the context is short, and a long context has few states to merge.
@triton.jit
def _split_begin(split):
    long = tl.minimum(tl.maximum(split - 16, 0), 28)
    return 256 * tl.minimum(split, 16) + 1024 * long + 4096 * tl.maximum(split - 44, 0)


@triton.jit
def _split_of(position):
    long = tl.minimum(tl.maximum(position - 4096, 0), 28672)
    return tl.minimum(position, 4096) // 256 + long // 1024 + tl.maximum(position - 32768, 0) // 4096


def count_splits(slots: int) -> int:
    """Number of splits of positions 0 … slots - 1."""
    return -(-min(slots, 4096) // 256) - (-min(max(slots - 4096, 0), 28672) // 1024) - (-max(slots - 32768, 0) // 4096)


# The state of a query q after keys j: row_max = max_j s_j, row_sum = sum_j exp(s_j - row_max), and
# out = sum_j exp(s_j - row_max) * v_j, where s_j = scale * q . k_j. It starts with (0, 0, -inf). Everything is in base
# 2. q [M, D], k and v [BLOCK_N, D], visible [BLOCK_N, M], out [D, M].
@triton.jit
def _attend_to_block(q, k, v, visible, out, row_sum, row_max, scale_log2):
    scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale_log2
    scores = tl.where(visible, scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 0))
    # A block without a visible key leaves the state as it is: its weights are 0, and the decay is 1.
    weights = tl.exp2(scores - finite(new_max)[None, :])
    decay = tl.exp2(row_max - finite(new_max))
    out = tl.dot(tl.trans(v), weights.to(v.dtype), out * decay[None, :], input_precision="ieee")
    return out, row_sum * decay + tl.sum(weights, 0), new_max


@triton.jit
def _attend_to_whole_blocks(
    q, k_base, v_base, stride_ks, stride_vs, first, end, dim, scale_log2, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr
):
    """The state after the keys first … end - 1, of which a query sees all."""
    visible = tl.full([BLOCK_N, q.shape[0]], True, tl.int1)
    out, row_sum, row_max = _no_keys(q.shape[1], q.shape[0])
    for start in range(first, end, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        k = load_key_tile(k_base, stride_ks, slot, dim, slot < end, HEAD_DIM)
        v = load_key_tile(v_base, stride_vs, slot, dim, slot < end, HEAD_DIM)
        out, row_sum, row_max = _attend_to_block(q, k, v, visible, out, row_sum, row_max, scale_log2)
    return out, row_sum, row_max


@triton.jit
def _merge(out, row_sum, row_max, later_out, later_sum, later_max):
    new_max = tl.maximum(row_max, later_max)
    decay = tl.exp2(row_max - finite(new_max))
    later = tl.exp2(later_max - finite(new_max))
    return out * decay[None, :] + later_out * later[None, :], row_sum * decay + later_sum * later, new_max


# paths[b, i] = depth, then the nodes on the path from the root to node i, which are the visible ones in the order of
# their numbers. One program takes one node.
@triton.jit
def paths_kernel(mask_ptr, paths_ptr, stride_mb, stride_mq, stride_mk, NODES: tl.constexpr, BLOCK: tl.constexpr):
    node, batch = tl.program_id(0), tl.program_id(1)
    number = tl.arange(0, BLOCK)
    mask_row = mask_ptr + batch.to(tl.int64) * stride_mb + node * stride_mq
    on_path = tl.load(mask_row + number * stride_mk, mask=number < NODES, other=0).to(tl.int32) != 0
    rank = tl.cumsum(on_path.to(tl.int32), 0)
    path = paths_ptr + (batch * tl.num_programs(0) + node).to(tl.int64) * (NODES + 1)
    tl.store(path, tl.max(rank, 0) - 1)
    tl.store(path + rank, number, mask=on_path)


@triton.jit
def _no_keys(BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr):
    """The state before the first key: (out, row_sum, row_max)."""
    out = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    return out, row_sum, tl.full([BLOCK_M], float("-inf"), tl.float32)


@triton.jit
def _store_state(outs_ptr, sums_ptr, maxima_ptr, state, out, row_sum, row_max, in_rows, dim, HEAD_DIM: tl.constexpr):
    """Write a state into the rows `state`."""
    tl.store(sums_ptr + state, row_sum, mask=in_rows)
    tl.store(maxima_ptr + state, row_max, mask=in_rows)
    in_tile = (dim < HEAD_DIM)[:, None] & in_rows[None, :]
    tl.store(outs_ptr + state[None, :] * HEAD_DIM + dim[:, None], out, mask=in_tile)


# The states over the whole blocks of the prefix, per split: outs [P, B, K, rows, D], sums and maxima [P, B, K, rows].
# A row is a pair (node, query head of the group). One program takes BLOCK_M rows of one KV head and one split; a split
# without a whole block is not written.
@triton.jit(do_not_specialize=["kv_heads", "group", "num_rows"])
def whole_blocks_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
    outs_ptr,
    sums_ptr,
    maxima_ptr,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    scale_log2,
    kv_heads,
    group,
    num_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    if OVERLAP:
        # The next kernel may start as soon as there is room. It waits before it reads the states.
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(1)
    batch = (tl.program_id(2) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(2) % kv_heads).to(tl.int64)
    whole = tl.load(lengths_ptr + batch).to(tl.int32) // BLOCK_N * BLOCK_N
    first = _split_begin(split)
    end = tl.minimum(_split_begin(split + 1), whole)
    if first >= end:
        return

    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    dim = tl.arange(0, BLOCK_D)
    q_base = q_ptr + batch * stride_qb + kv_head * group * stride_qh
    q = load_query_tile(q_base, stride_qh, stride_qn, row, dim, group, num_rows, HEAD_DIM)
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kh
    v_base = v_ptr + batch * stride_vb + kv_head * stride_vh
    out, row_sum, row_max = _attend_to_whole_blocks(
        q, k_base, v_base, stride_ks, stride_vs, first, end, dim, scale_log2, HEAD_DIM, BLOCK_N
    )
    state = (split * tl.num_programs(2) + tl.program_id(2)).to(tl.int64) * num_rows + row
    _store_state(outs_ptr, sums_ptr, maxima_ptr, state, out, row_sum, row_max, row < num_rows, dim, HEAD_DIM)


# out = attention to the positions up to the query's own. With CONTINUES, one program takes the rows of one node, whose
# keys up to the last whole block of the prefix are in the states of `whole_blocks_kernel`: it merges the complete
# splits, continues the last one with the prefix's rest and the node's ancestors, and merges this. Otherwise one program
# takes BLOCK_M rows of a chain of nodes at the positions from `start` on, and reads all keys.
@triton.jit(do_not_specialize=["start", "path_size", "kv_heads", "group", "num_rows"])
def last_blocks_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    lengths_ptr,
    paths_ptr,
    outs_ptr,
    sums_ptr,
    maxima_ptr,
    out_ptr,
    stride_qb,
    stride_qh,
    stride_qn,
    stride_kb,
    stride_kh,
    stride_ks,
    stride_vb,
    stride_vh,
    stride_vs,
    stride_ob,
    stride_oh,
    stride_on,
    scale_log2,
    start,
    path_size,
    kv_heads,
    group,
    num_rows,
    CONTINUES: tl.constexpr,
    HAS_PATHS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    batch = (tl.program_id(1) // kv_heads).to(tl.int64)
    kv_head = (tl.program_id(1) % kv_heads).to(tl.int64)
    dim = tl.arange(0, BLOCK_D)
    out, row_sum, row_max = _no_keys(BLOCK_D, BLOCK_M)
    split_out, split_sum, split_max = _no_keys(BLOCK_D, BLOCK_M)

    if CONTINUES:
        first_row = tl.program_id(0) * group
        end_row = first_row + group
        length = tl.load(lengths_ptr + batch).to(tl.int32)
        last = length
        if HAS_PATHS:
            path = paths_ptr + (batch * tl.num_programs(0) + tl.program_id(0)) * (path_size + 1)
            last += tl.load(path)
        unread = length // BLOCK_N * BLOCK_N
    else:
        first_row = tl.program_id(0) * BLOCK_M
        end_row = tl.minimum(first_row + BLOCK_M, num_rows)
        length = start
        last = start + (end_row - 1) // group
        unread = 0
    row = first_row + tl.arange(0, BLOCK_M)
    in_rows = row < end_row
    in_tile = (dim < HEAD_DIM)[:, None] & in_rows[None, :]
    position = start + row // group
    if CONTINUES:
        position = row * 0 + last
    q_base = q_ptr + batch * stride_qb + kv_head * group * stride_qh
    q = load_query_tile(q_base, stride_qh, stride_qn, row, dim, group, end_row, HEAD_DIM)
    first_split = _split_of(unread)

    if CONTINUES:
        if OVERLAP:
            tl.extra.cuda.gdc_wait()
        states = tl.num_programs(1).to(tl.int64) * num_rows
        state = tl.program_id(1).to(tl.int64) * num_rows + row
        for _ in tl.range(0, first_split, num_stages=3):
            later_sum = tl.load(sums_ptr + state, mask=in_rows, other=0.0)
            later_max = tl.load(maxima_ptr + state, mask=in_rows, other=float("-inf"))
            later_out = tl.load(outs_ptr + state[None, :] * HEAD_DIM + dim[:, None], mask=in_tile, other=0.0)
            out, row_sum, row_max = _merge(out, row_sum, row_max, later_out, later_sum, later_max)
            state += states
        has_state = _split_begin(first_split) < unread
        split_sum = tl.load(sums_ptr + state, mask=in_rows & has_state, other=0.0)
        split_max = tl.load(maxima_ptr + state, mask=in_rows & has_state, other=float("-inf"))
        split_row = outs_ptr + state[None, :] * HEAD_DIM + dim[:, None]
        split_out = tl.load(split_row, mask=in_tile & has_state, other=0.0)

    k_base = k_ptr + batch * stride_kb + kv_head * stride_kh
    v_base = v_ptr + batch * stride_vb + kv_head * stride_vh
    for split in range(first_split, _split_of(last) + 1):
        end = tl.minimum(_split_begin(split + 1), last + 1)
        for block in range(tl.maximum(_split_begin(split), unread), end, BLOCK_N):
            key = block + tl.arange(0, BLOCK_N)
            slot = key
            if HAS_PATHS:
                in_tree = (key >= length) & (key <= last)
                slot = tl.where(in_tree, length + tl.load(path + 1 + key - length, mask=in_tree, other=0), key)
            # Lanes past the last key count as 0, for all queries at the same places.
            k = load_key_tile(k_base, stride_ks, slot, dim, key <= last, HEAD_DIM)
            v = load_key_tile(v_base, stride_vs, slot, dim, key <= last, HEAD_DIM)
            visible = key[:, None] <= position[None, :]
            split_out, split_sum, split_max = _attend_to_block(
                q, k, v, visible, split_out, split_sum, split_max, scale_log2
            )
        out, row_sum, row_max = _merge(out, row_sum, row_max, split_out, split_sum, split_max)
        split_out, split_sum, split_max = _no_keys(BLOCK_D, BLOCK_M)

    node = (row // group).to(tl.int64)
    out_row = out_ptr + batch * stride_ob + (kv_head * group + row % group) * stride_oh + node * stride_on
    tl.store(out_row[None, :] + dim[:, None], out / row_sum[None, :], mask=in_tile)
