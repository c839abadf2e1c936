"""Selection of the best nodes of a tree and of branches next to it, in one launch.

Priorities, higher is better:
  node of the tree     its path's log-probability, or minus its arrival time in a sampled tree; at most its parent's
  node of a branch     its path's estimated log-probability, or the priority of the tree's node with the same path if
                       that is larger; +inf next to a sampled tree, where the draws must not decide about it
Of equal priorities the lower number is better. So the best nodes contain all their ancestors.

In a sampled tree a node's priority must not depend on its token, given the draws before it. This holds for the arrival
time, and does not for the probability of the token (see `acceptance.reject`).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from longspec.kernels.shared.tree import Branches, SelectedNodes, Tree
from longspec.kernels.torch import trees

MAX_POOL = 128
"""Largest number of nodes of tree and branches together, all pairs of which one program compares."""


# The pool is the root, the slots of the branches and the other nodes of the tree, in this order. One program takes one
# sequence. Names: i and j are pool numbers along the rows and columns of a matrix.
@triton.jit
def _select_nodes_kernel(
    tokens_ptr,
    parents_ptr,
    visible_ptr,
    priorities_ptr,
    levels_ptr,
    branch_tokens_ptr,
    branch_scores_ptr,
    out_tokens_ptr,
    out_parents_ptr,
    out_levels_ptr,
    out_visible_ptr,
    out_wide_ptr,
    out_ranks_ptr,
    out_in_branch_ptr,
    size,
    nodes,
    BY_ARRIVAL: tl.constexpr,
    CHAINS: tl.constexpr,
    DEPTH: tl.constexpr,
    BLOCK: tl.constexpr,
):
    batch = tl.program_id(0).to(tl.int64)
    infinity = float("inf")
    pool = tl.arange(0, BLOCK)
    slots: tl.constexpr = CHAINS * DEPTH
    is_slot = (pool > 0) & (pool <= slots)
    in_tree = (is_slot == 0) & (pool < size + slots)
    wide = tl.where(pool > slots, pool - slots, 0)

    # The tree. Its padding and lanes outside of it have the parent -1.
    entry = batch * size + wide
    token = tl.load(tokens_ptr + entry, mask=in_tree, other=0)
    linked = tl.load(parents_ptr + entry, mask=in_tree, other=-1) >= 0
    level = tl.load(levels_ptr + wide, mask=in_tree, other=0).to(tl.int32)
    own_priority = tl.load(priorities_ptr + entry, mask=in_tree, other=-infinity)
    if BY_ARRIVAL:
        own_priority = -own_priority
    own_priority = tl.where(own_priority == own_priority, own_priority, -infinity)
    sees = tl.load(
        visible_ptr + entry[:, None] * size + wide[None, :], mask=in_tree[:, None] & in_tree[None, :], other=0
    )
    sees = sees != 0
    priority = tl.min(tl.where(sees, own_priority[None, :], infinity), 1)
    priority = tl.where(linked, priority, -infinity)
    priority = tl.where(pool == 0, infinity, priority)

    exists = linked | (pool == 0)
    is_absorbed = pool < 0
    slot_chain = pool < 0  # replaced below if there are branches
    slot_level = pool * 0
    linked_visible = sees
    if CHAINS > 0:
        slot = tl.where(is_slot, pool - 1, 0)
        slot_chain = slot // DEPTH
        slot_level = slot % DEPTH + 1
        slot_entry = batch * slots + slot
        slot_token = tl.load(branch_tokens_ptr + slot_entry, mask=is_slot, other=0)
        slot_priority = tl.load(branch_scores_ptr + slot_entry, mask=is_slot, other=-infinity).to(priority.dtype)
        slot_exists = is_slot & (slot_priority > -infinity)

        # into: the slot that absorbs a node of the tree; follows[i, s]: slot s is on the path of node i.
        into = pool * 0
        follows = sees & (pool < 0)[None, :]
        for chain in tl.static_range(CHAINS):
            at = batch * slots + chain * DEPTH + level - 1
            reached = linked & (level <= DEPTH)
            chain_priority = tl.load(branch_scores_ptr + at, mask=reached, other=-infinity)
            chain_token = tl.load(branch_tokens_ptr + at, mask=reached, other=-1)
            equal = reached & (chain_priority > -infinity) & (chain_token == token)
            leaves = in_tree & (equal == 0) & (pool > 0)
            absorbed = equal & (tl.max((sees & leaves[None, :]).to(tl.int32), 1) == 0)
            is_absorbed |= absorbed
            into = tl.where(absorbed, chain * DEPTH + level, into)
            shared = tl.max(tl.where(sees & absorbed[None, :], level[None, :], 0), 1)
            follows |= (shared[:, None] >= slot_level[None, :]) & (slot_chain == chain)[None, :]

        same_chain = is_slot[None, :] & (slot_chain[:, None] == slot_chain[None, :])
        above = same_chain & (slot_level[None, :] <= slot_level[:, None])
        absorbs = is_absorbed[None, :] & (into[None, :] == pool[:, None])
        if BY_ARRIVAL:
            slot_priority = tl.where(slot_exists, infinity, slot_priority)
        else:
            slot_priority = tl.maximum(slot_priority, tl.max(tl.where(absorbs, priority[None, :], -infinity), 1))
        priority = tl.where(is_absorbed, -infinity, priority)
        priority = tl.where(is_slot, tl.where(slot_exists, slot_priority, -infinity), priority)
        wide = tl.where(is_slot, tl.max(tl.where(absorbs, wide[None, :], 0), 1), wide)
        token = tl.where(slot_exists, slot_token, token)
        level = tl.where(is_slot, slot_level, level)
        exists = (exists & (is_absorbed == 0)) | slot_exists

        on_slot = tl.where(is_slot[:, None], above, follows) & slot_exists[None, :]
        linked_visible = tl.where(is_slot[None, :], on_slot, sees | (pool == 0)[None, :])

    # Padding and absorbed nodes see themselves alone, and no other node sees them.
    itself = pool[:, None] == pool[None, :]
    linked_visible = (linked_visible & exists[:, None] & exists[None, :]) | itself

    in_pool = pool < size + slots
    better = (priority[None, :] > priority[:, None]) | (
        (priority[None, :] == priority[:, None]) & (pool[None, :] < pool[:, None])
    )
    rank = tl.sum((better & in_pool[None, :]).to(tl.int32), 1)
    selected = in_pool & (rank < nodes)
    number = tl.sum((selected[None, :] & (pool[None, :] < pool[:, None])).to(tl.int32), 1)
    # The closest ancestor is the last one, because ancestors precede their descendants.
    is_ancestor = linked_visible & (itself == 0) & selected[None, :]
    parent = tl.max(tl.where(is_ancestor, number[None, :], -1), 1)

    out = batch * nodes + number
    tl.store(out_tokens_ptr + out, token, mask=selected)
    tl.store(out_parents_ptr + out, parent.to(tl.int64), mask=selected)
    tl.store(out_levels_ptr + out, level.to(tl.int64), mask=selected)
    tl.store(out_wide_ptr + out, wide.to(tl.int64), mask=selected)
    tl.store(out_ranks_ptr + out, rank.to(tl.int64), mask=selected)
    tl.store(out_in_branch_ptr + out, (is_slot & exists).to(tl.uint8), mask=selected)
    pairs = selected[:, None] & selected[None, :]
    tl.store(out_visible_ptr + out[:, None] * nodes + number[None, :], linked_visible.to(tl.uint8), mask=pairs)


def fits(tree: Tree, branches: Branches | None) -> bool:
    """Whether the kernel takes a tree and branches of these sizes."""
    slots = 0 if branches is None else branches.tokens[0].numel()
    return tree.tokens.shape[1] + slots <= MAX_POOL


def select_nodes(
    tree: Tree, levels: Tensor, nodes: int, by_arrival: bool, branches: Branches | None = None
) -> SelectedNodes:
    """See `Backend.select_nodes`. All tensors are contiguous."""
    if not fits(tree, branches):
        return trees.select_nodes(tree, levels, nodes, by_arrival, branches)
    batch, size = tree.tokens.shape
    integers = tree.tokens.new_empty(5, batch, nodes)
    tokens, parents, new_levels, wide, ranks = integers
    visible = torch.empty(batch, nodes, nodes, dtype=torch.bool, device=levels.device)
    in_branch = torch.empty(batch, nodes, dtype=torch.bool, device=levels.device)
    _, chains, depth = (0, 0, 1) if branches is None else branches.tokens.shape
    block = triton.next_power_of_2(size + chains * depth)
    _select_nodes_kernel[(batch,)](
        *(tree.tokens, tree.parents, tree.visible.view(torch.uint8), tree.arrivals if by_arrival else tree.scores),
        *(levels, *((None, None) if branches is None else branches)),
        *(tokens, parents, new_levels, visible.view(torch.uint8), wide, ranks, in_branch.view(torch.uint8)),
        *(size, nodes),
        BY_ARRIVAL=by_arrival,
        CHAINS=chains,
        DEPTH=depth,
        BLOCK=block,
        num_warps=16 if block > 64 else 4,  # the matrices of all pairs stay in registers
    )
    return SelectedNodes(tokens, parents, new_levels, visible, wide, ranks, in_branch)
