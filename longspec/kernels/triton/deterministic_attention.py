"""Attention whose result for a query depends on its own keys alone, bit for bit.

Neither the other queries of a pass nor the pass that stored a key have an effect. Keys are read in blocks of BLOCK_N
at absolute positions, blocks form splits at absolute positions, and the states of the splits are merged in the order of
positions. A node of a tree finds its ancestors at the positions after the prefix, where they are once accepted.

Query rows are the narrow side of all matrix products, so that the number of rows changes no sum. Multiplications and
additions are not fused, because compilers choose differently in different kernels.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.shared.attention import Attend
from longspec.kernels.triton.attention import TritonAttention
from longspec.kernels.triton.attention_tiles import LOG2_E, check_layout, load_key_tile, load_query_tile, padded_dim
from longspec.kernels.triton.online_softmax import finite
from longspec.kernels.triton.overlap import overlap_options

BLOCK_N = 64
"""Keys per block."""
MANY_ROWS = 64
"""Query rows per program, of several nodes."""


class DeterministicAttention(TritonAttention):
    """Decoding attention and prefill that give a query the same result in every pass; the draft's is Triton's."""

    name = "deterministic"

    def hybrid(self, lengths: Tensor, tree_mask: Tensor | None) -> Attend:
        assert tree_mask is not None
        paths = root_paths(tree_mask) if tree_mask.shape[2] > 1 else None

        def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
            return path_attention(q, k, v, lengths, paths, scale, self.gpu.shared_memory, self.gpu.overlaps)

        return attend

    def prefix(self, q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, scale: float) -> Tensor:
        return super().hybrid(lengths, None)(q, k, v, scale)

    def prefill(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return causal_attention(q, k, v, scale, self.gpu.shared_memory)


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
def _merge(out, row_sum, row_max, later_out, later_sum, later_max):
    new_max = tl.maximum(row_max, later_max)
    decay = tl.exp2(row_max - finite(new_max))
    later = tl.exp2(later_max - finite(new_max))
    return out * decay[None, :] + later_out * later[None, :], row_sum * decay + later_sum * later, new_max


# paths[b, i] = depth, then the nodes on the path from the root to node i, which are the visible ones in the order of
# their numbers. One program takes one node.
@triton.jit
def _paths_kernel(mask_ptr, paths_ptr, stride_mb, stride_mq, stride_mk, NODES: tl.constexpr, BLOCK: tl.constexpr):
    node, batch = tl.program_id(0), tl.program_id(1)
    number = tl.arange(0, BLOCK)
    mask_row = mask_ptr + batch.to(tl.int64) * stride_mb + node * stride_mq
    on_path = tl.load(mask_row + number * stride_mk, mask=number < NODES, other=0).to(tl.int32) != 0
    rank = tl.cumsum(on_path.to(tl.int32), 0)
    path = paths_ptr + (batch * tl.num_programs(0) + node).to(tl.int64) * (NODES + 1)
    tl.store(path, tl.max(rank, 0) - 1)
    tl.store(path + rank, number, mask=on_path)


# The states over the whole blocks of the prefix, per split: outs [P, B, K, rows, D], sums and maxima [P, B, K, rows].
# A row is a pair (node, query head of the group). One program takes BLOCK_M rows of one KV head and one split; a split
# without a whole block is not written.
@triton.jit(do_not_specialize=["kv_heads", "group", "num_rows"])
def _whole_blocks_kernel(
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
    visible = tl.full([BLOCK_N, BLOCK_M], True, tl.int1)
    out = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    for start in range(first, end, BLOCK_N):
        slot = start + tl.arange(0, BLOCK_N)
        k = load_key_tile(k_base, stride_ks, slot, dim, end, HEAD_DIM)
        v = load_key_tile(v_base, stride_vs, slot, dim, end, HEAD_DIM)
        out, row_sum, row_max = _attend_to_block(q, k, v, visible, out, row_sum, row_max, scale_log2)

    state = (split * tl.num_programs(2) + tl.program_id(2)).to(tl.int64) * num_rows + row
    in_rows = row < num_rows
    tl.store(sums_ptr + state, row_sum, mask=in_rows)
    tl.store(maxima_ptr + state, row_max, mask=in_rows)
    in_tile = (dim < HEAD_DIM)[:, None] & in_rows[None, :]
    tl.store(outs_ptr + state[None, :] * HEAD_DIM + dim[:, None], out, mask=in_tile)


# out = attention to the positions up to the query's own. With CONTINUES, one program takes the rows of one node, whose
# keys up to the last whole block of the prefix are in the states of `_whole_blocks_kernel`: it merges the complete
# splits, continues the last one with the prefix's rest and the node's ancestors, and merges this. Otherwise one program
# takes BLOCK_M rows of a chain of nodes at the positions from `start` on, and reads all keys.
@triton.jit(do_not_specialize=["start", "path_size", "kv_heads", "group", "num_rows"])
def _last_blocks_kernel(
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
    out = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    split_out = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
    split_sum = tl.zeros([BLOCK_M], tl.float32)
    split_max = tl.full([BLOCK_M], float("-inf"), tl.float32)

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
            # Lanes past the last key read nothing and count as 0, for all queries at the same places.
            in_keys = (key <= last)[:, None] & (dim < HEAD_DIM)[None, :]
            k = tl.load(k_base + slot.to(tl.int64)[:, None] * stride_ks + dim[None, :], mask=in_keys, other=0.0)
            v = tl.load(v_base + slot.to(tl.int64)[:, None] * stride_vs + dim[None, :], mask=in_keys, other=0.0)
            visible = key[:, None] <= position[None, :]
            split_out, split_sum, split_max = _attend_to_block(
                q, k, v, visible, split_out, split_sum, split_max, scale_log2
            )
        out, row_sum, row_max = _merge(out, row_sum, row_max, split_out, split_sum, split_max)
        split_out = tl.zeros([BLOCK_D, BLOCK_M], tl.float32)
        split_sum = tl.zeros([BLOCK_M], tl.float32)
        split_max = tl.full([BLOCK_M], float("-inf"), tl.float32)

    node = (row // group).to(tl.int64)
    out_row = out_ptr + batch * stride_ob + (kv_head * group + row % group) * stride_oh + node * stride_on
    tl.store(out_row[None, :] + dim[:, None], out / row_sum[None, :], mask=in_tile)


def root_paths(tree_mask: Tensor) -> Tensor:
    """The depth of each node, then the nodes on its path from the root: int32 [B, N, M + 1], undefined after the path.

    tree_mask: bool [B, N, M], True where node j is on the path to node i; a path's numbers increase.
    """
    batch, nodes, keys = tree_mask.shape
    paths = torch.empty(batch, nodes, keys + 1, dtype=torch.int32, device=tree_mask.device)
    # At least one node per thread.
    block = max(128, triton.next_power_of_2(keys))
    _paths_kernel[(nodes, batch)](
        tree_mask.view(torch.uint8), paths, *tree_mask.stride(), NODES=keys, BLOCK=block, num_warps=4
    )
    return paths


def path_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    paths: Tensor | None,
    scale: float,
    shared_memory: int,
    overlap: bool,
) -> Tensor:
    """Attention of each node to its prefix and to the nodes on its path, itself included, as if they were accepted.

    q [B, H, N, D]; k, v: the cache [B, K, S, D]; last dimensions contiguous; one dtype (fp32, fp16, bf16). lengths int
    [B]. Node j is in slot lengths[b] + j. paths: see `root_paths`; None for a single node. shared_memory: bytes
    available to a program. overlap: let the second kernel start early. Returns [B, H, N, D] in q's dtype, a view of
    [B, N, H, D]. Raises ValueError for tensors of other layouts.
    """
    check_layout(q, k, v)
    batch, heads, nodes, head_dim = q.shape
    kv_heads = k.shape[1]
    rows = heads // kv_heads * nodes
    states = count_splits(k.shape[2]), batch, kv_heads, rows
    outs = torch.empty(*states, head_dim, dtype=torch.float32, device=q.device)
    sums, maxima = torch.empty(2, *states, dtype=torch.float32, device=q.device)
    block_m = max(16, triton.next_power_of_2(rows)) if rows <= MANY_ROWS else MANY_ROWS
    _whole_blocks_kernel[(triton.cdiv(rows, block_m), states[0], batch * kv_heads)](
        *(q, k, v, lengths, outs, sums, maxima),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        *(scale * LOG2_E, kv_heads, heads // kv_heads, rows),
        OVERLAP=overlap,
        **_launch_options(q, block_m, 4, shared_memory),
    )
    return _last_blocks(q, k, v, lengths, paths, (outs, sums, maxima), 0, scale, shared_memory, overlap)


def causal_attention(q: Tensor, k: Tensor, v: Tensor, scale: float, shared_memory: int) -> Tensor:
    """Attention of a chunk of the prompt: query i of N is at position S - N + i and sees the keys up to its own.

    q [B, H, N, D]; k, v [B, K, S, D]. Dtypes, layout, result and errors as in `path_attention`.
    """
    check_layout(q, k, v)
    return _last_blocks(q, k, v, None, None, None, k.shape[2] - q.shape[2], scale, shared_memory, False)


def _last_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor | None,
    paths: Tensor | None,
    states: tuple[Tensor, Tensor, Tensor] | None,
    start: int,
    scale: float,
    shared_memory: int,
    overlap: bool,
) -> Tensor:
    batch, heads, nodes, head_dim = q.shape
    kv_heads = k.shape[1]
    group = heads // kv_heads
    # [B, N, H, D] in memory, so that the output projection reads contiguous rows.
    out = torch.empty((batch, nodes, heads, head_dim), dtype=q.dtype, device=q.device).transpose(1, 2)
    block_m = MANY_ROWS if states is None else max(16, triton.next_power_of_2(group))
    tiles = triton.cdiv(group * nodes, block_m) if states is None else nodes
    # A pointer argument that the kernel does not read is q.
    pointers = [q if x is None else x for x in (lengths, paths, *(states or (None,) * 3))]
    _last_blocks_kernel[(tiles, batch * kv_heads)](
        *(q, k, v, *pointers, out),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        *(*out.stride()[:3], scale * LOG2_E, start, 0 if paths is None else paths.shape[2] - 1),
        *(kv_heads, group, group * nodes),
        CONTINUES=states is not None,
        HAS_PATHS=paths is not None,
        OVERLAP=overlap,
        **_launch_options(q, block_m, 3 if states is None else 2, shared_memory),
        **overlap_options(overlap),
    )
    return out


def _launch_options(q: Tensor, block_m: int, most_stages: int, shared_memory: int) -> dict[str, int | bool]:
    """Block sizes and options that both kernels share. Without fused multiplication and addition both round alike."""
    block_d = padded_dim(q.shape[3])
    # Queries and weights stay, and 4096 bytes are for Triton's reductions and changes of layout.
    room = shared_memory - 4096 - block_m * (block_d + BLOCK_N) * q.element_size()
    stages = room // (2 * BLOCK_N * block_d * q.element_size())
    sizes = dict(HEAD_DIM=q.shape[3], BLOCK_M=block_m, BLOCK_N=BLOCK_N, BLOCK_D=block_d)
    return dict(**sizes, num_warps=4, num_stages=max(1, min(most_stages, stages)), enable_fp_fusion=False)
