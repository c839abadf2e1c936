"""Growth of a tree by one level over all parents and the whole vocabulary, in one launch after the logit statistics.

The `width` best continuations are in the `width` sub-chunks with the best entries. So the kernel selects these
sub-chunks first, from the statistics, and then the continuations within them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.decoding.tree import Tree
from longspec.kernels.shared.logit_statistics import CHUNK, SUB, load_keys, logit_statistics, write_softmax_chunk
from longspec.kernels.shared.watch import Watch, launch_arguments

MAX_WIDTH = 64
"""Largest number of nodes of a level."""
MAX_CANDIDATES = 2**15
"""Largest number of sub-chunks of all parents together, which one program holds at a time."""


@triton.jit
def _sorting_bits(values):
    """int64 sort keys in the order of values, fp32 or fp64; the low 16 bits are 1.

    The bits of a positive float are ordered as integers; those of a negative one in reverse, so they are flipped. fp32
    moves up by 16 bits, fp64 loses its low 16 bits.
    """
    if values.dtype == tl.float64:
        bits = values.to(tl.int64, bitcast=True) | 0xFFFF
        return bits ^ ((bits >> 63) & 0x7FFFFFFFFFFF0000)
    else:
        bits = values.to(tl.int32, bitcast=True)
        return ((bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.int64) << 16) | 0xFFFF


@triton.jit
def _sorted_value(keys, dtype: tl.constexpr):
    """The value of a sort key; inverse of `_sorting_bits`."""
    if dtype == tl.float64:
        bits = (keys ^ ((keys >> 63) & 0x7FFFFFFFFFFF0000)) & -65536
    else:
        bits = (keys >> 16).to(tl.int32)
        bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return bits.to(dtype, bitcast=True)


@triton.jit
def _largest(values, COUNT: tl.constexpr, BLOCK_W: tl.constexpr):
    """The COUNT largest of values [n], fp32 or fp64, in descending order, and their indices, [BLOCK_W] each.

    Of equal values the first comes first. Entries past COUNT are -inf. fp64 values lose their low 16 bits.
    """
    lane = tl.arange(0, BLOCK_W)
    index = tl.arange(0, values.shape[0])
    empty = _sorting_bits(tl.full([1], float("-inf"), values.dtype))
    largest = tl.broadcast_to(empty, [BLOCK_W])
    # The low 16 bits of a key are 0xFFFF - index: all keys differ, and ties are broken by the index.
    keys = _sorting_bits(values) - index
    for rank in range(0, COUNT):
        best = tl.max(keys, 0)
        largest = tl.where(lane == rank, best, largest)
        keys = tl.where(keys == best, empty, keys)
    return _sorted_value(largest, values.dtype), (0xFFFF - (largest & 0xFFFF)).to(tl.int32)


@triton.jit
def _pick(values, index):
    """values[index] for values [n] and index [w], as a sum over a one-hot mask: registers have no indices."""
    chosen = index[:, None] == tl.arange(0, values.shape[0])[None, :]
    return tl.sum(tl.where(chosen, values[None, :], 0), 1)


@triton.jit
def _merit(key, lse, score, arrival, first, RACE: tl.constexpr):
    """The order of continuations: the log-probability of the path, or in a race minus its arrival time.

    score and arrival are the parent's, key is the logit, in a race logit - log(noise). Without a race:
      merit = score + log p, with log p = key - lse
    In a race the time of a path is exponential with rate exp(score + log p), so time = noise / exp(score + log p). The
    first child, at time `first`, arrives with the parent:
      merit = -(arrival + time - first)
    """
    if RACE:
        time = tl.exp(lse - score - key)
        merit = tl.where(time == float("inf"), float("-inf"), -(arrival + tl.maximum(time - first, 0.0)))
    else:
        merit = score + key - lse
    return merit


@triton.jit
def _log_sum_exp(chunk_maxima_ptr, chunk_sums_ptr, row, is_row, chunks, BLOCK_C: tl.constexpr):
    """log sum exp of rows [n] from the statistics of their chunks; 0 where is_row is False."""
    part = tl.arange(0, BLOCK_C)
    parts = row[:, None] * chunks + part[None, :]
    in_parts = is_row[:, None] & (part < chunks)[None, :]
    maxima = tl.load(chunk_maxima_ptr + parts, mask=in_parts, other=float("-inf"))
    sums = tl.load(chunk_sums_ptr + parts, mask=in_parts, other=0.0)
    maximum = tl.where(is_row, tl.max(maxima, 1), 0.0)
    return maximum + tl.log(tl.where(is_row, tl.sum(sums * tl.exp(maxima - maximum[:, None]), 1), 1.0))


@triton.jit
def _link(visible_ptr, parents_ptr, tree, parent, child, exists, in_level, nodes, BLOCK_N: tl.constexpr):
    """Write parents and visible nodes of the nodes `child` [w] below `parent` [w] of one tree.

    A node sees itself and what its parent sees. Padding has the parent -1 and sees only itself.
    """
    tl.store(parents_ptr + tree * nodes + child, tl.where(exists, parent, -1).to(tl.int64), mask=in_level)
    node = tl.arange(0, BLOCK_N)[None, :]
    ancestor = tl.load(
        visible_ptr + (tree * nodes + parent)[:, None] * nodes + node, mask=exists[:, None] & (node < nodes), other=0
    )
    visible = tl.where(child[:, None] == node, 1, ancestor).to(tl.uint8)
    mask = in_level[:, None] & (node < nodes)
    tl.store(visible_ptr + (tree * nodes + child)[:, None] * nodes + node, visible, mask=mask)


# children = top-WIDTH over (parent, token) of _merit(...), written to the tree of one sequence by program (b, 0).
# In a race, programs (b, 1 + parent * chunks + c) write q[parent] = softmax(logits[parent] / T), a chunk each, in the
# same launch.
@triton.jit
def _grow_level_kernel(
    logits_ptr,
    noise_ptr,
    best_ptr,
    chunk_maxima_ptr,
    chunk_sums_ptr,
    q_ptr,
    stride_qb,
    tokens_ptr,
    parents_ptr,
    visible_ptr,
    scores_ptr,
    arrivals_ptr,
    faults_ptr,
    fault,
    inverse_temperature,
    vocab,
    subs,
    chunks,
    num_parents,
    nodes,
    above,
    here,
    WIDTH: tl.constexpr,
    SUB: tl.constexpr,
    CHUNK: tl.constexpr,
    RACE: tl.constexpr,
    WATCH: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    batch = tl.program_id(0).to(tl.int64)
    if RACE:  # noqa: SIM102 (a compile-time condition, unlike the next one)
        if tl.program_id(1) > 0:
            parent = (tl.program_id(1) - 1) // chunks
            write_softmax_chunk(
                logits_ptr,
                chunk_maxima_ptr,
                chunk_sums_ptr,
                q_ptr + batch * stride_qb + parent.to(tl.int64) * vocab,
                batch * num_parents + parent,
                (tl.program_id(1) - 1) % chunks,
                inverse_temperature,
                vocab,
                chunks,
                CHUNK,
                BLOCK_C,
            )
            return

    parent = tl.arange(0, BLOCK_P)
    is_parent = parent < num_parents
    row = batch * num_parents + parent
    lse = _log_sum_exp(chunk_maxima_ptr, chunk_sums_ptr, row, is_parent, chunks, BLOCK_C)
    if WATCH:
        # NaN and infinity among the logits of a parent make their log-sum-exp NaN or infinite.
        is_faulty = is_parent & ((lse > float("-inf")) & (lse < float("inf")) == 0)
        tl.store(faults_ptr + batch, fault, mask=tl.max(is_faulty.to(tl.int32), 0) > 0)
    parent_node = batch * nodes + above + parent
    score = tl.load(scores_ptr + parent_node, mask=is_parent, other=float("-inf"))
    arrival = tl.load(arrivals_ptr + parent_node, mask=is_parent, other=float("inf"))

    # Select the sub-chunks with the best continuations.
    sub = tl.arange(0, BLOCK_S)
    in_subs = is_parent[:, None] & (sub < subs)[None, :]
    best = tl.load(best_ptr + row[:, None] * subs + sub[None, :], mask=in_subs, other=float("-inf"))
    first = tl.exp(lse - score - tl.max(best, 1))
    merit = _merit(best, lse[:, None], score[:, None], arrival[:, None], first[:, None], RACE)
    merit = tl.where(in_subs, merit, float("-inf"))
    sub_merit, index = _largest(tl.reshape(merit, [BLOCK_P * BLOCK_S]), WIDTH, BLOCK_W)
    sub_parent = index // BLOCK_S
    sub_number = index % BLOCK_S

    # Select the best continuations within them.
    column = sub_number[:, None] * SUB + tl.arange(0, SUB)[None, :]
    possible = (sub_merit > float("-inf"))[:, None] & (column < vocab)
    offsets = (batch * num_parents + sub_parent)[:, None] * vocab + column
    _, keys = load_keys(logits_ptr, noise_ptr, offsets, possible, inverse_temperature, RACE)
    merit = _merit(
        keys,
        _pick(lse, sub_parent)[:, None],
        _pick(score, sub_parent)[:, None],
        _pick(arrival, sub_parent)[:, None],
        _pick(first, sub_parent)[:, None],
        RACE,
    )
    merit = tl.where(possible, merit, float("-inf"))
    child_merit, index = _largest(tl.reshape(merit, [BLOCK_W * SUB]), WIDTH, BLOCK_W)

    # Write them to the tree.
    lane = tl.arange(0, BLOCK_W)
    in_level = lane < WIDTH
    exists = child_merit > float("-inf")
    child_parent = _pick(sub_parent, index // SUB)
    token = tl.where(exists, _pick(sub_number, index // SUB) * SUB + index % SUB, 0)
    _link(visible_ptr, parents_ptr, batch, above + child_parent, here + lane, exists, in_level, nodes, BLOCK_N)
    child = batch * nodes + here + lane
    tl.store(tokens_ptr + child, token.to(tl.int64), mask=in_level)
    if RACE:
        offsets = (batch * num_parents + child_parent) * vocab + token
        logit = tl.load(logits_ptr + offsets, mask=exists, other=float("-inf")).to(tl.float32) * inverse_temperature
        tl.store(scores_ptr + child, _pick(score, child_parent) + logit - _pick(lse, child_parent), mask=in_level)
        tl.store(arrivals_ptr + child, -child_merit, mask=in_level)
    else:
        tl.store(scores_ptr + child, child_merit, mask=in_level)


def fits(logits: Tensor, width: int) -> bool:
    """Whether the kernel takes a level of `width` nodes below n parents with logits [B, n, V]."""
    _, parents, vocab = logits.shape
    candidates = triton.next_power_of_2(parents) * triton.next_power_of_2(triton.cdiv(vocab, SUB))
    return width <= MAX_WIDTH and candidates <= MAX_CANDIDATES


def grow_level(
    tree: Tree,
    above: slice,
    width: int,
    logits: Tensor,
    temperature: float,
    noise: Tensor | None = None,
    q: Tensor | None = None,
    watch: Watch | None = None,
) -> None:
    """Write the level after the nodes `above` to the tree, whose tensors are contiguous.

    Arguments as in `vocabulary.best_children`; with `noise` and `q`, which go together, as in
    `vocabulary.sampled_children`.
    """
    logits = logits.contiguous()
    batch, num_parents, vocab = logits.shape
    statistics = logit_statistics(logits, temperature, noise)
    subs, chunks = statistics.best.shape[1], statistics.chunk_sums.shape[1]
    _grow_level_kernel[(batch, 1 if q is None else 1 + num_parents * chunks)](
        logits,
        noise,
        *statistics,
        q,
        0 if q is None else q.stride(0),
        tree.tokens,
        tree.parents,
        tree.visible.view(torch.uint8),
        tree.scores,
        tree.arrivals,
        *launch_arguments(watch),
        1 / temperature,
        vocab,
        subs,
        chunks,
        num_parents,
        tree.tokens.shape[1],
        above.start,
        above.stop,
        WIDTH=width,
        SUB=SUB,
        CHUNK=CHUNK,
        RACE=noise is not None,
        WATCH=watch is not None,
        BLOCK_W=triton.next_power_of_2(width),
        BLOCK_P=triton.next_power_of_2(num_parents),
        BLOCK_C=triton.next_power_of_2(chunks),
        BLOCK_S=triton.next_power_of_2(subs),
        BLOCK_N=triton.next_power_of_2(tree.tokens.shape[1]),
        num_warps=8,
    )
