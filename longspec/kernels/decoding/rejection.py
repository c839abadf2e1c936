"""Recursive rejection down a tree sampled without replacement: one program a row walks the whole path.

After some of a node's children have failed, p is (p - ratio · q)₊ / total, and q is what the failed ones left of q,
divided by its mass. The next child x passes with probability mass · (p(x) - ratio · q(x)) / (q(x) · total); if it
fails, total / mass is added to the ratio, and one pass over the vocabulary finds the new total and mass. (They are
summed anew, because a difference would lose what is improbable; so a failed child's p and q are set to 0 in place.)
"""

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
RESIDUAL_BLOCK = 2048
LARGEST_FACTOR = 2.0**100


@triton.jit
def _left(p, q, ratio, unit, LARGEST_FACTOR: tl.constexpr):
    """(p - ratio · q)₊ in fp32. q is taken in units of its mass, in two steps, because a mass can be denormal."""
    scale = 1.0 / unit
    factor = tl.minimum(scale, LARGEST_FACTOR)
    own_q = q * factor.to(tl.float32) * (scale / factor).to(tl.float32)
    return tl.maximum(p - own_q * (ratio * unit).to(tl.float32), 0.0)


@triton.jit
def _sums(p_row, q_row, ratio, unit, vocab, BLOCK: tl.constexpr, LARGEST_FACTOR: tl.constexpr):
    """Σ (p - ratio · q)₊ and Σ q, fp64 scalars."""
    total = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocab, BLOCK, num_stages=3):
        token = start + tl.arange(0, BLOCK)
        p = tl.load(p_row + token, mask=token < vocab, other=0.0)
        q = tl.load(q_row + token, mask=token < vocab, other=0.0)
        total += _left(p, q, ratio, unit, LARGEST_FACTOR)
        mass += q
    return tl.sum(total, 0).to(tl.float64), tl.sum(mass, 0).to(tl.float64)


@triton.jit
def _rejection_kernel(
    tokens_ptr,
    parents_ptr,
    q_ptr,
    p_ptr,
    coins_ptr,
    path_ptr,
    count_ptr,
    state_ptr,
    nodes,
    inner_nodes,
    vocab,
    DEPTH: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST_FACTOR: tl.constexpr,
):
    batch = tl.program_id(0).to(tl.int64)
    tokens_row = tokens_ptr + batch * nodes
    parents_row = parents_ptr + batch * nodes
    p_row = p_ptr + batch * nodes * vocab
    q_row = q_ptr + batch * inner_nodes * vocab
    step = tl.arange(0, BLOCK_D)
    path = tl.zeros([BLOCK_D], tl.int64)
    count = tl.full((), 0, tl.int32)
    node = tl.full((), 0, tl.int64)
    one = tl.full((), 1.0, tl.float64)
    ratio, unit, total, mass = one - one, one, one, one
    for child in range(1, nodes):
        if tl.load(parents_row + child) == node:
            token = tl.load(tokens_row + child)
            p_token = tl.load(p_row + token).to(tl.float64)
            q_token = tl.load(q_row + token).to(tl.float64)
            odds = mass * (p_token - ratio * q_token) / (q_token * total)
            if tl.load(coins_ptr + batch * nodes + child) < odds:
                p_row += (child - node) * vocab
                q_row += (tl.minimum(child, inner_nodes - 1) - node) * vocab  # a leaf has none: any row will do
                node = node * 0 + child
                count += 1
                path = tl.where(step >= count, node, path)
                ratio, unit, total, mass = one - one, one, one, one
            else:
                tl.store(p_row + token, 0.0)
                tl.store(q_row + token, 0.0)
                tl.debug_barrier()  # every thread is to read what one of them has written
                further = ratio + total / mass
                new_total, new_mass = _sums(p_row, q_row, further, mass, vocab, BLOCK, LARGEST_FACTOR)
                # Rounding can leave nothing where p and q agree; a rejection there has probability zero.
                changed = new_total > 0.0
                ratio = tl.where(changed, further, ratio)
                total = tl.where(changed, new_total, total)
                unit = tl.where(changed, mass, unit)
                mass = new_mass
    tl.store(path_ptr + batch * (DEPTH + 1) + step, path, mask=step <= DEPTH)
    tl.store(count_ptr + batch, count.to(tl.int64))
    tl.store(state_ptr + batch * 2, ratio)
    tl.store(state_ptr + batch * 2 + 1, unit)


@triton.jit
def _residual_kernel(
    q_ptr,
    p_ptr,
    path_ptr,
    state_ptr,
    left_ptr,
    nodes,
    inner_nodes,
    vocab,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST_FACTOR: tl.constexpr,
):
    batch = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    node = tl.load(path_ptr + batch * (DEPTH + 1) + DEPTH)
    ratio = tl.load(state_ptr + batch * 2)
    unit = tl.load(state_ptr + batch * 2 + 1)
    p_row = p_ptr + (batch * nodes + node) * vocab
    q_row = q_ptr + (batch * inner_nodes + tl.minimum(node, inner_nodes - 1)) * vocab  # a leaf's ratio is 0
    p = tl.load(p_row + token, mask=token < vocab, other=0.0)
    q = tl.load(q_row + token, mask=token < vocab, other=0.0)
    left = _left(p, q, ratio, unit, LARGEST_FACTOR)
    tl.store(left_ptr + batch * vocab + token, left, mask=token < vocab)


def reject_children(
    tokens: Tensor, parents: Tensor, q: Tensor, p: Tensor, coins: Tensor, depth: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Descend to the first child that passes, as far as there is one.

    tokens, parents: LongTensors [B, N], numbered level by level, -1 for no parent; q [B, inner nodes, V], what each
    inner node's children were sampled from, and p [B, N, V], the target's: fp32; coins fp64 [B, N], uniform. Returns
    the path [B, depth + 1], which stays at its last node, the number of steps [B], and what is left of p there, fp32
    [B, V], not normalised. May use p and q up: entries of failed children become 0.
    """
    batch, nodes, vocab = p.shape
    tokens, parents, q, p, coins = (x.contiguous() for x in (tokens, parents, q, p, coins))
    path = tokens.new_empty(batch, depth + 1)
    count = tokens.new_empty(batch)
    state = coins.new_empty(batch, 2)
    left = p.new_empty(batch, vocab)
    sizes = nodes, q.shape[1], vocab
    block = min(BLOCK, triton.next_power_of_2(vocab))
    _rejection_kernel[(batch,)](
        tokens,
        parents,
        q,
        p,
        coins,
        path,
        count,
        state,
        *sizes,
        DEPTH=depth,
        BLOCK_D=triton.next_power_of_2(depth + 1),
        BLOCK=block,
        LARGEST_FACTOR=LARGEST_FACTOR,
        num_warps=8 if vocab > BLOCK else 4,
    )
    _residual_kernel[(batch, triton.cdiv(vocab, RESIDUAL_BLOCK))](
        q, p, path, state, left, *sizes, DEPTH=depth, BLOCK=RESIDUAL_BLOCK, LARGEST_FACTOR=LARGEST_FACTOR
    )
    return path, count, left
