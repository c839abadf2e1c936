"""Growth of a tree by one level over all parents and the whole vocabulary, in one launch after the logit statistics.

The `width` best continuations are in the `width` sub-chunks with the best entries. So the kernel selects these
sub-chunks first, from the statistics, and then the continuations within them.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.shared.tree import Draws, Tree
from longspec.kernels.shared.watch import Watch, launch_arguments
from longspec.kernels.torch import trees
from longspec.kernels.triton.logit_statistics import (
    SUB,
    inverse_temperature,
    logit_statistics,
    row_log_sum_exp,
    softmax_chunk,
)
from longspec.kernels.triton.selection import pick, select_children, select_sub_chunks

MAX_WIDTH = 64
"""Largest number of nodes of a level."""
MAX_CANDIDATES = 2**15
"""Largest number of sub-chunks of all parents together, which one program holds at a time."""


@triton.jit
def _write_links(visible_ptr, parents_ptr, tree, parent, child, exists, in_level, nodes, BLOCK_N: tl.constexpr):
    """Write parents and visible nodes of the nodes `child` [w] below the nodes `parent` [w] of one tree.

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


# children = top-WIDTH over (parent, token) of _priority(...), written to the tree of one sequence by program (b, 0).
# With noise, programs (b, 1 + parent * chunks + c) write q[parent] = softmax(logits[parent] / T), a chunk each. They
# are part of this launch because a launch of their own would cost more than they do.
# With IDS, column c of the logits belongs to the token ids[b, c], and a q of 0 is not written.
@triton.jit
def _grow_level_kernel(
    logits_ptr,
    noise_ptr,
    best_ptr,
    chunk_maxima_ptr,
    chunk_sums_ptr,
    q_ptr,
    stride_qb,
    stride_qn,
    ids_ptr,
    stride_ids,
    tokens_ptr,
    parents_ptr,
    visible_ptr,
    scores_ptr,
    arrivals_ptr,
    faults_ptr,
    fault,
    temperature_ptr,
    vocab,
    subs,
    chunks,
    num_parents,
    nodes,
    first_parent,
    first_child,
    WIDTH: tl.constexpr,
    HAS_NOISE: tl.constexpr,
    IDS: tl.constexpr,
    WATCH: tl.constexpr,
    WARM: tl.constexpr,
    BLOCK_W: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_S: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    batch = tl.program_id(0).to(tl.int64)
    inverse = inverse_temperature(temperature_ptr, batch, WARM)
    if HAS_NOISE:  # noqa: SIM102 (a compile-time condition, unlike the next one)
        if tl.program_id(1) > 0:
            q_parent = (tl.program_id(1) - 1) // chunks
            q_row = q_ptr + batch * stride_qb + q_parent.to(tl.int64) * stride_qn
            column, q, _ = softmax_chunk(
                logits_ptr,
                chunk_maxima_ptr,
                chunk_sums_ptr,
                batch * num_parents + q_parent,
                (tl.program_id(1) - 1) % chunks,
                inverse,
                vocab,
                chunks,
                BLOCK_C,
            )
            if IDS:
                q_token = tl.load(ids_ptr + batch * stride_ids + column, mask=column < vocab, other=0)
                tl.store(q_row + q_token, q, mask=(column < vocab) & (q != 0.0))
            else:
                tl.store(q_row + column, q, mask=column < vocab)
            return

    # The state of the parents, [BLOCK_P] each.
    parent = tl.arange(0, BLOCK_P)
    is_parent = parent < num_parents
    row = batch * num_parents + parent
    lse = row_log_sum_exp(chunk_maxima_ptr, chunk_sums_ptr, row, is_parent, chunks, BLOCK_C)
    if WATCH:
        # NaN and infinity among the logits of a parent make their log-sum-exp NaN or infinite.
        is_faulty = is_parent & ((lse > float("-inf")) & (lse < float("inf")) == 0)
        tl.store(faults_ptr + batch, fault, mask=tl.max(is_faulty.to(tl.int32), 0) > 0)
    parent_node = batch * nodes + first_parent + parent
    score = tl.load(scores_ptr + parent_node, mask=is_parent, other=float("-inf"))
    arrival = tl.load(arrivals_ptr + parent_node, mask=is_parent, other=float("inf"))

    # Best sub-chunks first, then the best continuations within them.
    sub_parent, sub_number, sub_exists, first = select_sub_chunks(
        best_ptr, row, is_parent, lse, score, arrival, subs, WIDTH, HAS_NOISE, BLOCK_W, BLOCK_P, BLOCK_S
    )
    child_parent, token, priority = select_children(
        logits_ptr,
        noise_ptr,
        batch * num_parents,
        sub_parent,
        sub_number,
        sub_exists,
        lse,
        score,
        arrival,
        first,
        inverse,
        vocab,
        WIDTH,
        HAS_NOISE,
        BLOCK_W,
    )

    # BLOCK_W is a power of two; lanes from WIDTH on hold nothing. Lanes without a continuation become padding.
    lane = tl.arange(0, BLOCK_W)
    in_level = lane < WIDTH
    exists = priority > float("-inf")
    token = tl.where(exists, token, 0)
    child = first_child + lane
    node = first_parent + child_parent
    _write_links(visible_ptr, parents_ptr, batch, node, child, exists, in_level, nodes, BLOCK_N)
    entry = batch * nodes + child
    if IDS:
        child_token = tl.load(ids_ptr + batch * stride_ids + token, mask=exists, other=0)
        tl.store(tokens_ptr + entry, child_token, mask=in_level)
    else:
        tl.store(tokens_ptr + entry, token.to(tl.int64), mask=in_level)
    if HAS_NOISE:
        # The priority is minus the arrival; the score, the log-probability of the path, follows from the logit.
        offsets = (batch * num_parents + child_parent) * vocab + token
        logit = tl.load(logits_ptr + offsets, mask=exists, other=float("-inf")).to(tl.float32) * inverse
        tl.store(scores_ptr + entry, pick(score, child_parent) + logit - pick(lse, child_parent), mask=in_level)
        tl.store(arrivals_ptr + entry, -priority, mask=in_level)
    else:
        tl.store(scores_ptr + entry, priority, mask=in_level)


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
    temperature: Tensor | None,
    draws: Draws | None = None,
    watch: Watch | None = None,
    ids: Tensor | None = None,
) -> None:
    """See `Backend.grow_level`. The tree's tensors and the rows of ids are contiguous."""
    if not fits(logits, width):
        return trees.grow_level(tree, above, width, logits, temperature, draws, watch, ids)
    noise, q = draws or (None, None)
    logits = logits.contiguous()
    batch, num_parents, vocab = logits.shape
    nodes = tree.tokens.shape[1]
    statistics = logit_statistics(logits, temperature, noise)
    subs, chunks = statistics.best.shape[1], statistics.chunk_sums.shape[1]
    if q is not None and ids is not None:
        q.zero_()

    # Program 0 of a sequence grows its tree. The others, with noise only, write a chunk of a parent's q each.
    _grow_level_kernel[(batch, 1 if q is None else 1 + num_parents * chunks)](
        *(logits, noise, *statistics),
        *(q, *((0, 0) if q is None else q.stride()[:2]), ids, 0 if ids is None else ids.stride(0)),
        *(tree.tokens, tree.parents, tree.visible.view(torch.uint8), tree.scores, tree.arrivals),
        *(*launch_arguments(watch), temperature),
        *(vocab, subs, chunks, num_parents, nodes, above.start, above.stop),
        WIDTH=width,
        HAS_NOISE=noise is not None,
        IDS=ids is not None,
        WATCH=watch is not None,
        WARM=temperature is not None,
        BLOCK_W=triton.next_power_of_2(width),
        BLOCK_P=triton.next_power_of_2(num_parents),
        BLOCK_C=triton.next_power_of_2(chunks),
        BLOCK_S=triton.next_power_of_2(subs),
        BLOCK_N=triton.next_power_of_2(nodes),
        num_warps=8,
    )
