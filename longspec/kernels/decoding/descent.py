"""The path down a tree by the target's choices, in one launch."""

import triton
import triton.language as tl
from torch import Tensor


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
    wanted = token == tl.load(choice_ptr + tree + parent, mask=parent >= 0, other=-1)
    step = tl.arange(0, BLOCK_D)
    path = tl.zeros([BLOCK_D], tl.int32)
    node = tl.min(tl.zeros([BLOCK_N], tl.int32), 0)
    count = node
    for depth in range(0, DEPTH):
        following = tl.min(tl.where(wanted & (parent == node), child, BLOCK_N), 0)
        found = following < BLOCK_N
        node = tl.where(found, following, node)
        count += found.to(tl.int32)
        path = tl.where(step > depth, node, path)
    tl.store(path_ptr + batch * (DEPTH + 1) + step, path.to(tl.int64), mask=step <= DEPTH)
    tl.store(count_ptr + batch, count.to(tl.int64))
    tl.store(bonus_ptr + batch, tl.load(choice_ptr + tree + node))


def follow_choices(tokens: Tensor, parents: Tensor, choice: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor]:
    """Descend from the root while a child's token is the target's choice at its parent.

    tokens, parents, choice: LongTensors [B, N], parents before children and -1 for none. Returns the path
    [B, depth + 1], which stays at its last node, the number of steps [B] and the choice [B] at the last node.
    """
    batch, nodes = tokens.shape
    path = tokens.new_empty(batch, depth + 1)
    count, bonus = tokens.new_empty(2, batch)
    _descent_kernel[(batch,)](
        tokens.contiguous(),
        parents.contiguous(),
        choice.contiguous(),
        path,
        count,
        bonus,
        nodes,
        DEPTH=depth,
        BLOCK_N=triton.next_power_of_2(nodes),
        BLOCK_D=triton.next_power_of_2(depth + 1),
        num_warps=1,
    )
    return path, count, bonus
