"""Lookup branches in two launches: matches of the newest tokens per chunk of the history, then the branches.

The first branch of a row follows the longest match. The second one follows the longest match whose next token differs
from that of the first. Each chunk reports two candidates: its best match, and its best match with another next token.
The two branches are always among these candidates.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.shared.tree import LookupState

CHUNK = 2048
"""Positions per program that looks for matches."""
NO_MATCH = tl.constexpr(-1)


@triton.jit
def _token_at(history_row, position, root, newest, mask):
    """Tokens at positions up to the newest one, which is the root and not in the history yet."""
    token = tl.load(history_row + position, mask=mask & (position < newest), other=-1)
    return tl.where(position == newest, root, token)


# Score of position p: match length * 2^32 + p, so the longest match is first, then the latest. One program stores the
# best score of its chunk, and the best among positions that another token follows.
@triton.jit
def _match_kernel(
    history_ptr,
    roots_ptr,
    lengths_ptr,
    scores_ptr,
    positions_per_row,
    chunks,
    LONGEST: tl.constexpr,
    CHUNK: tl.constexpr,
):
    batch = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    history_row = history_ptr + batch * positions_per_row
    newest = tl.load(lengths_ptr + batch).to(tl.int64)
    root = tl.load(roots_ptr + batch)
    position = chunk.to(tl.int64) * CHUNK + tl.arange(0, CHUNK)
    inside = position < newest

    length = tl.zeros([CHUNK], tl.int64)
    matches = inside
    for back in tl.static_range(LONGEST):
        last = tl.full((), 0, tl.int64) + newest - back
        wanted = _token_at(history_row, tl.maximum(last, 0), root, newest, last >= 0)
        matches = matches & (position >= back) & (last >= 0)
        token = tl.load(history_row + position - back, mask=matches, other=-1)
        matches = matches & (token == wanted)
        length += matches.to(tl.int64)

    score = tl.where(length > 0, (length << 32) + position, NO_MATCH)
    following = _token_at(history_row, position + 1, root, newest, inside)
    best = tl.max(score, 0)
    best_following = tl.max(tl.where(score == best, following, -1), 0)
    other = tl.max(tl.where(following != best_following, score, NO_MATCH), 0)
    out = scores_ptr + (batch * chunks + chunk) * 2
    tl.store(out, best)
    tl.store(out + 1, other)


@triton.jit
def _count_hits(
    hits,
    trials,
    former,
    newest,
    root,
    history_row,
    size,
    match_length,
    tokens_row,
    step,
    bucket,
    LONGEST: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """The hits and trials per bucket after a former branch, which counts up to its first miss."""
    after = former + 1 + step
    known = (step < size) & (after <= newest) & (match_length > 0)
    truth = _token_at(history_row, after, root, newest, known)
    proposed = tl.load(tokens_row + step, mask=known, other=-1)
    first_miss = tl.min(tl.where((proposed != truth) | (known == 0), step, DEPTH), 0)
    counted = tl.minimum(match_length + step, LONGEST) - 1
    here = counted[None, :] == bucket[:, None]
    hits += tl.sum((here & (step < first_miss)[None, :]).to(tl.float32), 1)
    trials += tl.sum((here & (known & (step <= first_miss))[None, :]).to(tl.float32), 1)
    return hits, trials


@triton.jit
def _path_scores(match_length, log_rate, step, bucket, LONGEST: tl.constexpr, DEPTH: tl.constexpr):
    """The estimated log-probability of the path to each node of a branch.

    Summed one by one, because sums in another order could increase with depth.
    """
    path_score = tl.full((), 0.0, tl.float32)
    scores = tl.zeros([step.shape[0]], tl.float32)
    for depth in range(DEPTH):
        rate_bucket = tl.minimum(tl.maximum(match_length + depth, 1), LONGEST) - 1
        path_score += tl.sum(tl.where(bucket == rate_bucket, log_rate, 0.0), 0)
        scores = tl.where(step == depth, path_score, scores)
    return scores


@triton.jit
def _best_branch(score, newest, root, history_row, step, DEPTH: tl.constexpr):
    """Of the best candidate: its score, whether it exists, its match length, and the tokens of its branch."""
    best = tl.max(score, 0)
    exists = best >= 0
    end = tl.where(exists, best & 0xFFFFFFFF, 0)
    match_length = tl.where(exists, best >> 32, 0)
    # Where a branch reaches the root, it goes on as the tokens since the match repeat.
    period = tl.maximum(newest - end, 1)
    return best, exists, match_length, _token_at(history_row, end + 1 + step % period, root, newest, step < DEPTH)


@triton.jit
def _candidates(scores_row, chunks, history_row, newest, root, BLOCK_C: tl.constexpr):
    """The scores of the chunks' matches, and the token that follows each."""
    candidate = tl.arange(0, BLOCK_C)
    score = tl.load(scores_row + candidate, mask=candidate < chunks * 2, other=NO_MATCH)
    match = score & 0xFFFFFFFF
    return score, _token_at(history_row, match + 1, root, newest, score >= 0)


# One program takes one row: it counts the hits of the former branches, and writes the root and the new branches.
@triton.jit
def _branches_kernel(
    history_ptr,
    roots_ptr,
    lengths_ptr,
    scores_ptr,
    sizes_ptr,
    hits_ptr,
    trials_ptr,
    priors_ptr,
    tokens_ptr,
    path_scores_ptr,
    match_lengths_ptr,
    root_positions_ptr,
    prior_weight,
    positions_per_row,
    chunks,
    LONGEST: tl.constexpr,
    CHAINS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    batch = tl.program_id(0).to(tl.int64)
    history_row = history_ptr + batch * positions_per_row
    newest = tl.load(lengths_ptr + batch).to(tl.int64)
    root = tl.load(roots_ptr + batch)
    former = tl.load(root_positions_ptr + batch)
    step = tl.arange(0, BLOCK_D)
    bucket = tl.arange(0, BLOCK_M)
    in_buckets = bucket < LONGEST
    hits = tl.load(hits_ptr + batch * LONGEST + bucket, mask=in_buckets, other=0.0)
    trials = tl.load(trials_ptr + batch * LONGEST + bucket, mask=in_buckets, other=0.0)

    # Compare the former branches with the tokens emitted since then.
    for chain in tl.static_range(CHAINS):
        size = tl.load(sizes_ptr + chain)
        length = tl.load(match_lengths_ptr + batch * CHAINS + chain)
        tokens_row = tokens_ptr + (batch * CHAINS + chain) * DEPTH
        hits, trials = _count_hits(
            hits, trials, former, newest, root, history_row, size, length, tokens_row, step, bucket, LONGEST, DEPTH
        )
    tl.store(hits_ptr + batch * LONGEST + bucket, hits, mask=in_buckets)
    tl.store(trials_ptr + batch * LONGEST + bucket, trials, mask=in_buckets)
    tl.store(history_row + newest, root)
    tl.store(root_positions_ptr + batch, newest)

    tl.debug_barrier()  # the former branches are read before the new ones replace them

    # The best match, then the best one with another following token.
    score, following = _candidates(scores_ptr + batch * chunks * 2, chunks, history_row, newest, root, BLOCK_C)
    prior = tl.load(priors_ptr + bucket, mask=in_buckets, other=1.0)
    log_rate = tl.minimum(tl.log((hits + prior_weight * prior) / (trials + prior_weight)), 0.0)
    for chain in tl.static_range(CHAINS):
        best, exists, match_length, token = _best_branch(score, newest, root, history_row, step, DEPTH)
        scores = _path_scores(match_length, log_rate, step, bucket, LONGEST, DEPTH)
        size = tl.load(sizes_ptr + chain)
        scores = tl.where(exists & (step < size), scores, float("-inf"))
        out = (batch * CHAINS + chain) * DEPTH + step
        tl.store(tokens_ptr + out, token, mask=step < DEPTH)
        tl.store(path_scores_ptr + out, scores, mask=step < DEPTH)
        tl.store(match_lengths_ptr + batch * CHAINS + chain, match_length)
        best_following = tl.max(tl.where(score == best, following, -1), 0)
        score = tl.where(following != best_following, score, NO_MATCH)


def extend_branches(state: LookupState, root: Tensor, lengths: Tensor, sizes: Tensor, prior_weight: float) -> None:
    """See `Backend.extend_branches`."""
    batch, positions = state.history.shape
    _, chains, depth = state.tokens.shape
    longest = state.hits.shape[1]
    chunks = triton.cdiv(positions, CHUNK)
    scores = torch.empty(batch, chunks, 2, dtype=torch.long, device=root.device)
    _match_kernel[(batch, chunks)](
        state.history, root, lengths, scores, positions, chunks, LONGEST=longest, CHUNK=CHUNK, num_warps=8
    )
    _branches_kernel[(batch,)](
        *(state.history, root, lengths, scores, sizes, *state[1:]),
        *(prior_weight, positions, chunks),
        LONGEST=longest,
        CHAINS=chains,
        DEPTH=depth,
        BLOCK_C=triton.next_power_of_2(2 * chunks),
        BLOCK_D=triton.next_power_of_2(depth),
        BLOCK_M=triton.next_power_of_2(longest),
        num_warps=1,
    )
