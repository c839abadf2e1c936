"""The path through a tree that follows the target's choices, in one launch."""

import triton
import triton.language as tl
from torch import Tensor


# From node = root, for each depth: node = min {child : parents[child] == node and tokens[child] == choice[node]}, and
# node itself if there is no such child. One program takes one tree.
@triton.jit
def _descent_kernel(
    tokens_ptr,
    parents_ptr,
    choice_ptr,
    path_ptr,
    count_ptr,
    bonus_ptr,
    nodes,
    DEPTH: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    batch = tl.program_id(0)
    tree = batch * nodes
    child = tl.arange(0, BLOCK_N)
    parent = tl.load(parents_ptr + tree + child, mask=child < nodes, other=-1)
    token = tl.load(tokens_ptr + tree + child, mask=child < nodes, other=0)
    is_chosen = token == tl.load(choice_ptr + tree + parent, mask=parent >= 0, other=-1)

    step = tl.arange(0, BLOCK_D)
    path = tl.zeros([BLOCK_D], tl.int32)
    node = tl.min(tl.zeros([BLOCK_N], tl.int32), 0)  # the root as a scalar tensor, which the loop can carry
    count = node
    for depth in range(0, DEPTH):
        following = tl.min(tl.where(is_chosen & (parent == node), child, BLOCK_N), 0)
        exists = following < BLOCK_N
        node = tl.where(exists, following, node)
        count += exists.to(tl.int32)
        path = tl.where(step > depth, node, path)

    tl.store(path_ptr + batch * (DEPTH + 1) + step, path.to(tl.int64), mask=step <= DEPTH)
    tl.store(count_ptr + batch, count.to(tl.int64))
    tl.store(bonus_ptr + batch, tl.load(choice_ptr + tree + node))


def follow_choices(tokens: Tensor, parents: Tensor, choice: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `Backend.follow_choices`."""
    batch, nodes = tokens.shape
    path = tokens.new_empty(batch, depth + 1)
    count, bonus = tokens.new_empty(2, batch)
    _descent_kernel[(batch,)](
        *(tokens.contiguous(), parents.contiguous(), choice.contiguous()),
        *(path, count, bonus, nodes),
        DEPTH=depth,
        BLOCK_N=triton.next_power_of_2(nodes),
        BLOCK_D=triton.next_power_of_2(depth + 1),
        num_warps=1,
    )
    return path, count, bonus
