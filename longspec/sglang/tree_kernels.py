"""`GrowingTree` on a GPU: a launch per level in place of a dozen, and one for the choice of the verified nodes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.sglang.tree import LEVEL_PENALTY, Candidates, expanded_nodes, most_nodes

MOST_CANDIDATES = 256
"""Largest number of candidates of a tree, which one program compares in pairs."""
LOWEST = tl.constexpr(-1e30)
"""Score of a candidate of probability 0, above that of a candidate that is already expanded."""


# score[c] = path[c // K] + log_probability[c] - penalty; of the level's candidates c, the K best are expanded.
# One program takes one request. Levels do not write what they read, because a program's warps are not in step.
@triton.jit(do_not_specialize=["level", "first_child", "begin"])
def _grow_kernel(
    log_ptr,
    token_ptr,
    path_ptr,
    visible_ptr,
    scores_ptr,
    tokens_ptr,
    parents_ptr,
    next_path_ptr,
    next_token_ptr,
    next_visible_ptr,
    log_stride,
    token_stride,
    penalty,
    level,
    first_child,
    begin,
    candidates,
    parents,
    width,
    N: tl.constexpr,
    K: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_W: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK)
    exists = candidate < N * K
    node, child = row * N + candidate // K, candidate % K
    token = tl.load(token_ptr + node * token_stride + child, mask=exists, other=0)
    score = tl.load(log_ptr + node * log_stride + child, mask=exists, other=0.0).to(tl.float32) - penalty
    score = tl.maximum(tl.load(path_ptr + node, mask=exists, other=0.0) + score, LOWEST)
    tl.store(scores_ptr + row * candidates + begin + candidate, score, mask=exists)
    tl.store(tokens_ptr + row * candidates + begin + candidate, token, mask=exists)

    other = tl.arange(0, BLOCK_W)
    left = tl.where(exists, score, float("-inf"))
    for rank in tl.static_range(K):
        best = tl.argmax(left, 0)
        tl.store(next_path_ptr + row * K + rank, tl.max(left, 0))
        tl.store(next_token_ptr + row * K + rank, tl.sum(tl.where(candidate == best, token, 0), 0))
        column = 1 + level * K + rank
        tl.store(parents_ptr + row * parents + column, (begin + best).to(tl.int64), mask=column < parents)
        above = tl.load(visible_ptr + (row * N + best // K) * width + other, mask=other < width, other=0)
        sees = tl.where(other == first_child + rank, 1, above).to(tl.uint8)
        tl.store(next_visible_ptr + (row * K + rank) * width + other, sees, mask=other < width)
        left = tl.where(candidate == best, float("-inf"), left)


# chosen = the `count` best candidates in ascending order: those with fewer than `count` better ones. Of equal ones, the
# first is better.
@triton.jit
def _choose_kernel(scores_ptr, tokens_ptr, chosen_ptr, chosen_tokens_ptr, candidates, count, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, BLOCK)
    exists = candidate < candidates
    score = tl.load(scores_ptr + row * candidates + candidate, mask=exists, other=float("-inf"))
    token = tl.load(tokens_ptr + row * candidates + candidate, mask=exists, other=0)
    is_first = candidate[None, :] < candidate[:, None]
    better = (score[None, :] > score[:, None]) | ((score[None, :] == score[:, None]) & is_first)
    is_chosen = exists & (tl.sum(better.to(tl.int32), 1) < count)
    place = tl.cumsum(is_chosen.to(tl.int32), 0) - 1
    is_chosen = is_chosen & (place < count)
    tl.store(chosen_ptr + row * count + place, candidate.to(tl.int64), mask=is_chosen)
    tl.store(chosen_tokens_ptr + row * count + place, token, mask=is_chosen)


def fits(topk: int, steps: int) -> bool:
    """Whether the kernels have room for the candidates of a tree."""
    return most_nodes(topk, steps) <= MOST_CANDIDATES


class KernelTree:
    """The tree of one round for B requests, as `GrowingTree`."""

    def __init__(self, batch: int, topk: int, steps: int, device: torch.device) -> None:
        self.topk, self.first, self.level = topk, 0, 0
        self.visible = torch.zeros(batch, 1, expanded_nodes(topk, steps), dtype=torch.bool, device=device)
        self.visible[:, :, 0] = True
        self.path_scores = torch.zeros(batch, 1, device=device)
        self.scores = torch.empty(batch, most_nodes(topk, steps) - 1, device=device)
        self.tokens = self.scores.new_empty(self.scores.shape, dtype=torch.long)
        # The first column is -1, the others are written by all levels but the last.
        self.parents = self.tokens.new_full((batch, 1 + topk * (steps - 1)), -1)[:, : None if steps > 1 else 0]
        self.begin = 0

    def grow(self, log_probabilities: Tensor, tokens: Tensor) -> Tensor:
        """See `GrowingTree.grow`."""
        batch, nodes, topk = tokens.shape
        width = self.visible.shape[2]
        logs, tokens = (_rows(part) for part in (log_probabilities, tokens))
        path_scores, next_tokens = self.scores.new_empty(batch, topk), self.tokens.new_empty(batch, topk)
        visible = self.visible.new_empty(batch, topk, width)
        _grow_kernel[(batch,)](
            *(logs, tokens, self.path_scores, self.visible.view(torch.uint8), self.scores, self.tokens, self.parents),
            *(path_scores, next_tokens, visible.view(torch.uint8), logs.stride(0), tokens.stride(0), LEVEL_PENALTY),
            *(self.level, self.first + nodes, self.begin, self.scores.shape[1], self.parents.shape[1], width),
            N=nodes,
            K=topk,
            BLOCK=triton.next_power_of_2(nodes * topk),
            BLOCK_W=triton.next_power_of_2(width),
            num_warps=1,
        )
        self.first, self.begin, self.level = self.first + nodes, self.begin + nodes * topk, self.level + 1
        self.path_scores, self.visible = path_scores, visible
        return next_tokens

    def candidates(self, nodes: int) -> Candidates:
        """The best `nodes` - 1 candidates."""
        batch, candidates = self.scores.shape
        chosen, tokens = (self.tokens.new_empty(batch, nodes - 1) for _ in range(2))
        _choose_kernel[(batch,)](
            *(self.scores, self.tokens, chosen, tokens, candidates, nodes - 1), BLOCK=triton.next_power_of_2(candidates)
        )
        return Candidates(self.parents, chosen, tokens)


def _rows(part: Tensor) -> Tensor:
    """[B, n, k] as [B * n, k] with contiguous rows."""
    rows = part.flatten(0, 1)
    return rows if rows.stride(1) == 1 else rows.contiguous()
