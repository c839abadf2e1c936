"""The inner loop of tree attention and window attention, online softmax over slots under a mask, and its results."""

import triton
import triton.language as tl

from longspec.kernels.triton.attention_tiles import load_key_tile


@triton.jit
def _in_window(slot, length, level, WINDOW: tl.constexpr):
    """Whether a slot of the ring buffer holds a position p >= 0 with p >= length + level - WINDOW."""
    # The newest position p < length with p % WINDOW == slot. The remainder is that of C and needs a dividend >= 0.
    position = length - 1 - (length - 1 - slot + WINDOW) % WINDOW
    return (position >= 0) & (position >= length + level - WINDOW)


@triton.jit
def _visible(
    start,
    slot,
    mask_rows,
    stride_mk,
    tree_start,
    end,
    length,
    level,
    in_rows,
    BLOCK_N: tl.constexpr,
    TREE_NODES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """[keys, rows]: the visible slots of a block, those of the prefix or ring buffer, then the nodes of the tree."""
    visible = slot < tree_start
    if WINDOW:
        visible = visible & _in_window(slot, length, level, WINDOW)
    visible = tl.broadcast_to(visible[:, None], [BLOCK_N, in_rows.shape[0]])
    if TREE_NODES:  # noqa: SIM102 (a compile-time condition, unlike the next one)
        if start + BLOCK_N > tree_start:  # blocks without nodes skip the load of the mask
            in_tree = ((slot >= tree_start) & (slot < end))[:, None] & in_rows[None, :]
            node_mask = mask_rows[None, :] + (slot - tree_start)[:, None] * stride_mk
            visible = visible | (tl.load(node_mask, mask=in_tree, other=0) != 0)
    return visible


@triton.jit
def finite(row_max):
    """row_max, but 0 for a row that has seen no key yet: -inf - -inf would be NaN."""
    return tl.where(row_max == float("-inf"), 0.0, row_max)


@triton.jit
def store_part(out_ptr, lse_ptr, part_row, acc, row_sum, row_max, in_rows, dim, HEAD_DIM: tl.constexpr):
    """Write the normalized attention [rows, D] and the natural LSE [rows] of one part in the rows `part_row`."""
    LN_2: tl.constexpr = 0.6931471805599453
    # An empty part has the sum 0 and the maximum -inf: its output becomes 0 and its LSE -inf.
    divisor = tl.where(row_sum > 0.0, row_sum, 1.0)
    tl.store(lse_ptr + part_row, (row_max + tl.log2(divisor)) * LN_2, mask=in_rows)
    in_tile = in_rows[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(out_ptr + part_row[:, None] * HEAD_DIM + dim[None, :], acc / divisor[:, None], mask=in_tile)


# For a query q and the visible slots j from `first` to the last node, by online softmax over blocks of keys:
#   row_max = max_j scale * q . k_j
#   row_sum = sum_j exp(scale * q . k_j - row_max)
#   out = sum_j exp(scale * q . k_j - row_max) * v_j
# Slots before `tree_start` are visible to all queries (in a ring buffer, WINDOW > 0, if they are in the window). Slots
# from there on are the TREE_NODES nodes, visible under the mask.
@triton.jit
def attend_to_slots(
    q,
    k_base,
    v_base,
    stride_ks,
    stride_vs,
    mask_rows,
    stride_mk,
    first,
    tree_start,
    length,
    level,
    scale_log2,
    in_rows,
    dim,
    HEAD_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr,
    TREE_NODES: tl.constexpr,
    WINDOW: tl.constexpr,
):
    """Attention of a tile of queries, not normalized: (out [rows, D], row_sum [rows], row_max [rows]) in base 2."""
    BLOCK_M: tl.constexpr = q.shape[0]
    BLOCK_D: tl.constexpr = q.shape[1]
    end = tree_start + TREE_NODES
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    acc = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    # Scores are [keys, rows], transposed as compared to the prefix kernel, so that the few query rows are the narrow
    # side of the matrix products.
    for start in range(first, end, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        k = load_key_tile(k_base, stride_ks, slot, dim, slot < end, HEAD_DIM)
        v = load_key_tile(v_base, stride_vs, slot, dim, slot < end, HEAD_DIM)
        visible = _visible(
            start, slot, mask_rows, stride_mk, tree_start, end, length, level, in_rows, BLOCK_N, TREE_NODES, WINDOW
        )

        # One step of online softmax. The sums over the keys of a block are taken once, after the loop.
        scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale_log2
        scores = tl.where(visible, scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 0))
        finite_max = finite(new_max)
        weights = tl.exp2(scores - finite_max[None, :])
        decay = tl.exp2(row_max - finite_max)
        sums = sums * decay[None, :] + weights
        acc = acc * decay[None, :] + tl.dot(tl.trans(v), weights.to(v.dtype), input_precision="ieee")
        row_max = new_max
    return tl.trans(acc), tl.sum(sums, 0), row_max
