"""Recursive rejection in a tree whose siblings are sampled without replacement (arXiv 2402.14160).

At a node with the target's distribution p and the draft's q, the children are tried in the order of their draws.
Child x passes with probability min(1, p(x) / q(x)). If it fails, p becomes (p - q)+ and q loses x; both are normalized.

The kernel keeps p and q as they are and tracks the effect of the failed children F in three numbers:
  p after F = (p - ratio * q)+ / total,  q after F = q without F / mass.
Child x then passes if coin < mass * (p(x) - ratio * q(x)) / (q(x) * total). If it fails, ratio += total / mass, and one
pass over the vocabulary sums the new total and mass. Updating them by differences would lose improbable tokens. For the
sums, p and q of a failed child are set to 0 in place.

Certain children, which were not drawn, are tried before the others. Such a child x passes with p(x) / total. If it
fails, p and q lose x, and the ratio stays 0.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 8192
"""Tokens that the walking program reads at a time."""
RESIDUAL_BLOCK = 2048
"""Tokens per program of the residual kernel."""
LARGEST_FACTOR = tl.constexpr(2.0**100)
"""Largest factor by which q is scaled in one step; the inverse of a denormal mass overflows fp32."""


@triton.jit
def _residual(p, q, ratio, unit):
    """(p - ratio * q)+ in fp32, as (p - (ratio * unit) * (q / unit))+.

    unit is the mass at the last change of the ratio, so that ratio * unit is of normal size where q is denormal. The
    division takes two steps, because 1 / unit may overflow.
    """
    scale = 1.0 / unit
    factor = tl.minimum(scale, LARGEST_FACTOR)
    scaled_q = q * factor.to(tl.float32) * (scale / factor).to(tl.float32)
    return tl.maximum(p - scaled_q * (ratio * unit).to(tl.float32), 0.0)


@triton.jit
def _sums(p_row, q_row, ratio, unit, vocab, BLOCK: tl.constexpr):
    """sum (p - ratio * q)+ and sum q over the vocabulary, fp64 scalars."""
    total = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, vocab, BLOCK, num_stages=3):
        token = start + tl.arange(0, BLOCK)
        p = tl.load(p_row + token, mask=token < vocab, other=0.0)
        q = tl.load(q_row + token, mask=token < vocab, other=0.0)
        total += _residual(p, q, ratio, unit)
        mass += q
    return tl.sum(total, 0).to(tl.float64), tl.sum(mass, 0).to(tl.float64)


@triton.jit
def _row_of_q(q_rows_ptr, first, node, inner_nodes, OWN_ROWS: tl.constexpr):
    """The row of q that belongs to a node, int64. A leaf has none; it has no sampled children, so any row will do."""
    row = tl.load(q_rows_ptr + first + node) if OWN_ROWS else node
    return tl.minimum(row, inner_nodes - 1).to(tl.int64)


@triton.jit
def _try_child(token, p_row, q_row, ratio, total, mass, certain_ptr, first, child, SOME_CERTAIN: tl.constexpr):
    """The probability with which a child passes, and what its failure adds to the ratio."""
    # In fp64, because total and mass can be as small as the denormal numbers of fp32.
    p_token = tl.load(p_row + token).to(tl.float64)
    q_token = tl.load(q_row + token).to(tl.float64)
    acceptance = mass * (p_token - ratio * q_token) / (q_token * total)
    increase = total / mass
    if SOME_CERTAIN:
        is_certain = tl.load(certain_ptr + first + child) != 0
        acceptance = tl.where(is_certain, p_token / total, acceptance)
        increase = tl.where(is_certain, 0.0, increase)
    return acceptance, increase


@triton.jit
def _fail_child(p_row, q_row, token, increase, ratio, unit, total, mass, vocab, BLOCK: tl.constexpr):
    """Set p and q of a failed child to 0; the ratio, unit, total and mass after it."""
    tl.store(p_row + token, 0.0)
    tl.store(q_row + token, 0.0)
    tl.debug_barrier()  # all threads must read these zeros, which one of them writes
    new_ratio = ratio + increase
    new_total, new_mass = _sums(p_row, q_row, new_ratio, mass, vocab, BLOCK)
    # Rounding can leave nothing where p and q agree; a rejection there has probability zero.
    changed = new_total > 0.0
    ratio = tl.where(changed, new_ratio, ratio)
    total = tl.where(changed, new_total, total)
    return ratio, tl.where(changed, mass, unit), total, new_mass


@triton.jit
def _store_walk(path_ptr, count_ptr, state_ptr, batch, step, path, count, ratio, unit, DEPTH: tl.constexpr):
    """Write the path of one sequence, the number of its draft tokens, and the ratio and unit of its last node."""
    # The path repeats its last node, so its last entry tells the residual kernel where the walk ended.
    tl.store(path_ptr + batch * (DEPTH + 1) + step, path, mask=step <= DEPTH)
    tl.store(count_ptr + batch, count.to(tl.int64))
    tl.store(state_ptr + batch * 2, ratio)
    tl.store(state_ptr + batch * 2 + 1, unit)


# Walks the whole path of one sequence in one program; stores the ratio and unit of the last node for the residual.
# p_row and q_row point to the distributions at the current node and move down the path with it.
@triton.jit
def _rejection_kernel(
    tokens_ptr,
    parents_ptr,
    q_ptr,
    p_ptr,
    coins_ptr,
    q_rows_ptr,
    certain_ptr,
    path_ptr,
    count_ptr,
    state_ptr,
    nodes,
    inner_nodes,
    vocab,
    DEPTH: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    SOME_CERTAIN: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK: tl.constexpr,
):
    batch = tl.program_id(0).to(tl.int64)
    tokens_row = tokens_ptr + batch * nodes
    parents_row = parents_ptr + batch * nodes
    p_row = p_ptr + batch * nodes * vocab
    q_rows = q_ptr + batch * inner_nodes * vocab
    q_row = q_rows
    step, path = tl.arange(0, BLOCK_D), tl.zeros([BLOCK_D], tl.int64)
    count, node = tl.full((), 0, tl.int32), tl.full((), 0, tl.int64)
    # No child has failed: p - 0 * q, and both sums are 1. These are scalar tensors, which the loop can carry.
    one = tl.full((), 1.0, tl.float64)
    ratio, unit, total, mass = one - one, one, one, one
    # Parents precede their children, so one pass in order meets the children of each node on the path.
    for child in range(1, nodes):
        if tl.load(parents_row + child) == node:
            token = tl.load(tokens_row + child)
            acceptance, increase = _try_child(
                token, p_row, q_row, ratio, total, mass, certain_ptr, batch * nodes, child, SOME_CERTAIN
            )
            if tl.load(coins_ptr + batch * nodes + child) < acceptance:
                p_row += (child - node) * vocab
                q_row = q_rows + _row_of_q(q_rows_ptr, batch * nodes, child, inner_nodes, OWN_ROWS) * vocab
                node = node * 0 + child  # keeps the type int64
                count += 1
                path = tl.where(step >= count, node, path)
                ratio, unit, total, mass = one - one, one, one, one
            else:
                ratio, unit, total, mass = _fail_child(
                    p_row, q_row, token, increase, ratio, unit, total, mass, vocab, BLOCK
                )
    _store_walk(path_ptr, count_ptr, state_ptr, batch, step, path, count, ratio, unit, DEPTH)


# residual = (p - ratio * q)+ at the last node of each path, with failed children at 0. One program takes a block of
# tokens.
@triton.jit
def _residual_kernel(
    q_ptr,
    p_ptr,
    q_rows_ptr,
    path_ptr,
    state_ptr,
    residual_ptr,
    nodes,
    inner_nodes,
    vocab,
    DEPTH: tl.constexpr,
    OWN_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    batch = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    node = tl.load(path_ptr + batch * (DEPTH + 1) + DEPTH)
    ratio = tl.load(state_ptr + batch * 2)
    unit = tl.load(state_ptr + batch * 2 + 1)
    p_row = p_ptr + (batch * nodes + node) * vocab
    q_number = _row_of_q(q_rows_ptr, batch * nodes, node, inner_nodes, OWN_ROWS)
    q_row = q_ptr + (batch * inner_nodes + q_number) * vocab
    p = tl.load(p_row + token, mask=token < vocab, other=0.0)
    q = tl.load(q_row + token, mask=token < vocab, other=0.0)
    residual = _residual(p, q, ratio, unit)
    tl.store(residual_ptr + batch * vocab + token, residual, mask=token < vocab)


def reject_children(
    tokens: Tensor,
    parents: Tensor,
    q: Tensor,
    p: Tensor,
    coins: Tensor,
    depth: int,
    q_rows: Tensor | None = None,
    certain: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """See `Backend.reject_children`; p and q are fp32. The entries of failed children in p and q become 0."""
    batch, nodes, vocab = p.shape
    tokens, parents, q, p, coins = (x.contiguous() for x in (tokens, parents, q, p, coins))
    q_rows = None if q_rows is None else q_rows.contiguous()
    certain = None if certain is None else certain.contiguous().view(torch.uint8)

    path, count = tokens.new_empty(batch, depth + 1), tokens.new_empty(batch)
    state, residual = coins.new_empty(batch, 2), p.new_empty(batch, vocab)
    sizes = (nodes, q.shape[1], vocab)

    # One program per path, because each step of a walk depends on the previous one.
    _rejection_kernel[(batch,)](
        *(tokens, parents, q, p, coins, q_rows, certain),
        *(path, count, state),
        *sizes,
        DEPTH=depth,
        OWN_ROWS=q_rows is not None,
        SOME_CERTAIN=certain is not None,
        BLOCK_D=triton.next_power_of_2(depth + 1),
        BLOCK=min(BLOCK, triton.next_power_of_2(vocab)),
        num_warps=8 if vocab > BLOCK else 4,
    )

    # The residual has its own launch: many programs read the vocabulary faster than the one that walks.
    _residual_kernel[(batch, triton.cdiv(vocab, RESIDUAL_BLOCK))](
        *(q, p, q_rows, path, state, residual), *sizes, DEPTH=depth, OWN_ROWS=q_rows is not None, BLOCK=RESIDUAL_BLOCK
    )
    return path, count, residual
