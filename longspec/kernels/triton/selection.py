"""Device functions that select the best continuations of a tree's level, for the kernel that grows it.

The functions work on values that one program holds. Integer sort keys that contain the index make one maximum per
selected value enough, and the order of equal values certain.
"""

import triton
import triton.language as tl

from longspec.kernels.triton.logit_statistics import SUB, load_keys

_SUB = tl.constexpr(SUB)


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
def largest(values, COUNT: tl.constexpr, BLOCK_W: tl.constexpr):
    """The COUNT largest of values [n], fp32 or fp64, in descending order, and their indices, [BLOCK_W] each.

    Of equal values the first comes first. Entries past COUNT are -inf. fp64 values lose their low 16 bits.
    """
    lane = tl.arange(0, BLOCK_W)
    index = tl.arange(0, values.shape[0])
    empty = _sorting_bits(tl.full([1], float("-inf"), values.dtype))
    selected = tl.broadcast_to(empty, [BLOCK_W])
    # The low 16 bits of a key are 0xFFFF - index: all keys differ, and ties are broken by the index.
    keys = _sorting_bits(values) - index
    for rank in range(0, COUNT):
        best = tl.max(keys, 0)
        selected = tl.where(lane == rank, best, selected)
        keys = tl.where(keys == best, empty, keys)
    return _sorted_value(selected, values.dtype), (0xFFFF - (selected & 0xFFFF)).to(tl.int32)


@triton.jit
def pick(values, index):
    """values[index] for values [n] and index [w], as a sum over a one-hot mask: registers have no indices."""
    chosen = index[:, None] == tl.arange(0, values.shape[0])[None, :]
    return tl.sum(tl.where(chosen, values[None, :], 0), 1)


@triton.jit
def _priority(key, lse, score, arrival, first, HAS_NOISE: tl.constexpr):
    """The order of continuations: the log-probability of the path, or with noise minus its arrival time.

    score and arrival are the parent's, key is the logit, with noise logit - log(noise). Without noise:
      priority = score + log p, with log p = key - lse
    With noise the time of a path is exponential with rate exp(score + log p), so time = noise / exp(score + log p). The
    first child, at time `first`, arrives with the parent:
      priority = -(arrival + time - first)
    """
    if HAS_NOISE:
        time = tl.exp(lse - score - key)
        priority = tl.where(time == float("inf"), float("-inf"), -(arrival + tl.maximum(time - first, 0.0)))
    else:
        priority = score + key - lse
    return priority


@triton.jit
def select_sub_chunks(
    best_ptr,
    row,
    is_parent,
    lse,
    score,
    arrival,
    subs,
    WIDTH: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_S: tl.constexpr,
):
    """The WIDTH sub-chunks with the best continuations, best first.

    Returns parent, number within its row, and whether there is one, [BLOCK_W] each; and the time of the first child of
    each parent, [BLOCK_P].
    """
    sub = tl.arange(0, BLOCK_S)
    in_subs = is_parent[:, None] & (sub < subs)[None, :]
    best = tl.load(best_ptr + row[:, None] * subs + sub[None, :], mask=in_subs, other=float("-inf"))
    first = tl.exp(lse - score - tl.max(best, 1))
    priority = _priority(best, lse[:, None], score[:, None], arrival[:, None], first[:, None], HAS_NOISE)
    priority = tl.where(in_subs, priority, float("-inf"))
    sub_priority, index = largest(tl.reshape(priority, [BLOCK_P * BLOCK_S]), WIDTH, BLOCK_W)
    return index // BLOCK_S, index % BLOCK_S, sub_priority > float("-inf"), first


@triton.jit
def select_children(
    logits_ptr,
    noise_ptr,
    first_row,
    sub_parent,
    sub_number,
    sub_exists,
    lse,
    score,
    arrival,
    first,
    inverse,
    vocab,
    WIDTH: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    """The WIDTH best continuations in the selected sub-chunks: parent, token and priority, [BLOCK_W] each, best first.

    inverse: 1 / temperature. Entries without a continuation have the priority -inf.
    """
    column = sub_number[:, None] * _SUB + tl.arange(0, _SUB)[None, :]
    possible = sub_exists[:, None] & (column < vocab)
    offsets = (first_row + sub_parent)[:, None] * vocab + column
    _, keys = load_keys(logits_ptr, noise_ptr, offsets, possible, inverse, HAS_NOISE)
    priority = _priority(
        keys,
        pick(lse, sub_parent)[:, None],
        pick(score, sub_parent)[:, None],
        pick(arrival, sub_parent)[:, None],
        pick(first, sub_parent)[:, None],
        HAS_NOISE,
    )
    priority = tl.where(possible, priority, float("-inf"))
    child_priority, index = largest(tl.reshape(priority, [BLOCK_W * _SUB]), WIDTH, BLOCK_W)
    token = pick(sub_number, index // _SUB) * _SUB + index % _SUB
    return pick(sub_parent, index // _SUB), token, child_priority
