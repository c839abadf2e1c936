"""Growth of a tree, selection of its nodes and compaction of the KV cache in plain torch."""

import torch
from torch import Tensor

from longspec.kernels.shared.tree import Branches, Draws, SelectedNodes, Tree
from longspec.kernels.shared.watch import Watch
from longspec.kernels.torch.vocabulary import over_temperature, softmax


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
    """Grow the level after `above` by `width` continuations: all pairs of a parent and a token are candidates.

    Without draws, these are the candidates with the most probable paths, best first. With draws, they are sampled
    without replacement, in the order of the draws: each path arrives after an exponential time whose rate is its
    probability; the first child of a parent arrives with the parent, and by the memorylessness of the exponential
    distribution the others follow at independent times (the Gumbel top-k trick on a tree, arXiv 1903.06059). Hence the
    children of one parent, in their order, are draws from its q without replacement, for any number of children.

    above: node numbers of the last level. logits [B, n, V]: at each node of that level or, without draws, at its first
    n nodes, which alone get children; divided by temperature, fp64 [B], where None is 1.

    ids: LongTensor [B, C], the token of each column of logits and noise [B, n, C]; None if columns are tokens. Columns
    with a logit other than -inf have distinct tokens. q is then 0 for tokens without a column.
    """
    if draws is None:
        _grow_most_probable(tree, above, width, logits, temperature, watch)
    elif ids is None:
        _grow_sampled(tree, above, width, logits, temperature, draws, watch)
    else:
        of_columns = Draws(draws.noise, draws.q.new_empty(logits.shape))
        _grow_sampled(tree, above, width, logits, temperature, of_columns, watch)
        # Columns that do not exist add 0 to their token.
        draws.q.zero_().scatter_add_(2, ids[:, None].expand_as(of_columns.q), of_columns.q)

    if ids is not None:
        level = slice(above.stop, above.stop + width)
        exists = tree.parents[:, level] >= 0
        tree.tokens[:, level] = ids.gather(1, tree.tokens[:, level]).where(exists, 0)


def _grow_most_probable(
    tree: Tree, above: slice, width: int, logits: Tensor, temperature: Tensor | None, watch: Watch | None
) -> None:
    log_p = over_temperature(logits, temperature).float().log_softmax(-1)
    if watch is not None:
        watch.record(log_p[..., 0].isnan())  # a row that defines no distribution is NaN throughout

    # The `width` best of a level are among the `width` best of each parent, which are far fewer than n x V.
    per_parent = min(width, logits.shape[-1])
    best, token = log_p.topk(per_parent, dim=-1)
    scores = tree.scores[:, above][:, : logits.shape[1], None]
    score, index = (scores + best).flatten(1).topk(width, dim=-1)
    tree.enter_level(above, index // per_parent, token.flatten(1).gather(1, index), score, exists=score > -torch.inf)


def _grow_sampled(
    tree: Tree, above: slice, width: int, logits: Tensor, temperature: Tensor | None, draws: Draws, watch: Watch | None
) -> None:
    vocab = logits.shape[-1]
    noise, q = draws
    q.copy_(softmax(logits, temperature, watch))
    scores = tree.scores[:, above, None] + q.double().log()

    times = noise / scores.exp()
    arrivals = tree.arrivals[:, above, None] + (times - times.amin(-1, keepdim=True))
    arrivals = arrivals.where(times.isfinite(), torch.inf)

    arrival, index = arrivals.flatten(1).topk(width, dim=-1, largest=False)
    score = scores.flatten(1).gather(1, index)
    tree.enter_level(above, index // vocab, index % vocab, score, exists=arrival.isfinite())
    tree.arrivals[:, above.stop : above.stop + width] = arrival


def select_nodes(
    tree: Tree, levels: Tensor, nodes: int, by_arrival: bool, branches: Branches | None = None
) -> SelectedNodes:
    """The best `nodes` nodes of a tree of M nodes and its branches.

    levels: LongTensor [M], the depth of the tree's nodes, which are numbered level by level. by_arrival: whether the
    tree was sampled. The branches' nodes are then all selected, and there must be fewer than `nodes` of them. A node of
    the tree with the same path as a branch's node is absorbed by it: it is not selected a second time, and its children
    follow the node of the branch.
    """
    priority = -tree.arrivals if by_arrival else tree.scores
    priority = priority.where(priority == priority, -torch.inf)  # NaN has no place in an order
    # Rounding can make a child look better than its parent.
    priority = priority[:, None, :].where(tree.visible, torch.inf).amin(2)
    priority = priority.where(tree.parents >= 0, -torch.inf)
    priority[:, 0] = torch.inf
    wide = torch.arange(tree.tokens.shape[1], device=levels.device).expand_as(tree.tokens)
    pool = SelectedNodes(tree.tokens, tree.parents, levels.expand_as(wide), tree.visible, wide, wide, wide < 0)
    if branches is not None:
        pool, priority = _merge_branches(pool, priority, branches, by_arrival)

    order = priority.argsort(dim=1, descending=True, stable=True)  # of equal priorities the lower number comes first
    ranks = order.argsort(1)
    chosen = order[:, :nodes].sort(1).values
    size = pool.tokens.shape[1]
    visible = pool.visible.gather(1, chosen[..., None].expand(-1, -1, size))
    visible = visible.gather(2, chosen[:, None, :].expand(-1, nodes, -1))

    # The closest ancestor is the last one, because ancestors precede their descendants.
    number = torch.arange(nodes, device=levels.device)
    is_ancestor = visible & (number != number[:, None])
    parents = number.where(is_ancestor, -1).amax(2)
    tokens, levels, wide, in_branch = (
        values.gather(1, chosen) for values in (pool.tokens, pool.levels, pool.wide, pool.in_branch)
    )
    return SelectedNodes(tokens, parents, levels, visible, wide, ranks.gather(1, chosen), in_branch)


def _merge_branches(
    pool: SelectedNodes, priority: Tensor, branches: Branches, by_arrival: bool
) -> tuple[SelectedNodes, Tensor]:
    """The root, the nodes of all branches and those of the tree in one pool, and their priorities [B, K * D + M]. Nodes
    of the tree with the same path as a branch's node are absorbed by it: they turn into padding, and their children
    follow that node. The pool's parents and ranks are not filled in."""
    batch, chains, depth = branches.tokens.shape
    exists = (branches.scores > -torch.inf).flatten(1)
    branch_tokens = branches.tokens.flatten(1)
    slot_levels = torch.arange(1, depth + 1, device=priority.device).repeat(chains)
    slot_chains = torch.arange(chains, device=priority.device).repeat_interleave(depth)

    # followed[b, i, s]: the path of node i contains the node in slot s of the branches.
    tree_exists = (pool.parents >= 0)[..., None]
    equals = (pool.tokens[..., None] == branch_tokens[:, None]) & exists[:, None] & tree_exists
    equals &= pool.levels[..., None] == slot_levels
    on_path = (pool.visible.double() @ equals.double()) > 0  # the token of slot s at its depth on the path of node i
    same_chain = slot_chains[:, None] == slot_chains
    up_to = (same_chain & (slot_levels <= slot_levels[:, None])).double()  # [slot, slots from depth 1 to its own]
    followed = (on_path.double() @ up_to.T) == slot_levels
    absorbed_by = followed & equals
    is_absorbed = absorbed_by.any(2)

    absorbed_priority = priority[..., None].where(absorbed_by, -torch.inf).amax(1)
    extra_priority = torch.full_like(absorbed_priority, torch.inf)
    if not by_arrival:
        extra_priority = torch.maximum(branches.scores.flatten(1).to(priority.dtype), absorbed_priority)
    extra_priority = extra_priority.where(exists, -torch.inf)
    priority = priority.masked_fill(is_absorbed, -torch.inf)
    priority = torch.cat([priority[:, :1], extra_priority, priority[:, 1:]], 1)

    def join(first: Tensor, middle: Tensor) -> Tensor:
        return torch.cat([first[:, :1], middle.expand(batch, -1).to(first.dtype), first[:, 1:]], 1)

    wide = pool.wide[..., None].where(absorbed_by, 0).amax(1)
    merged = SelectedNodes(
        tokens=join(pool.tokens, branch_tokens.where(exists, 0)),
        parents=pool.parents,
        levels=join(pool.levels, slot_levels),
        visible=_merged_visible(pool.visible, ~is_absorbed, followed, exists, up_to.bool()),
        wide=join(pool.wide, wide),
        ranks=pool.ranks,
        in_branch=join(pool.in_branch, exists),
    )
    return merged, priority


def _merged_visible(in_tree: Tensor, keeps: Tensor, followed: Tensor, exists: Tensor, up_to: Tensor) -> Tensor:
    """The visible ancestors in a pool of the root, E slots of branches and the other M - 1 nodes of a tree.

    bool: in_tree [B, M, M], visible in the tree. keeps [B, M]: nodes that are not absorbed. followed [B, M, E]: slots
    on the path of each node. exists [B, E]: slots with a node. up_to [E, E]: slots on the path of each slot. Returns
    [B, E + M, E + M].
    """
    size, extra = followed.shape[1:]
    visible = torch.eye(extra + size, dtype=torch.bool, device=in_tree.device).repeat(len(in_tree), 1, 1)
    numbers = torch.arange(size, device=in_tree.device)
    numbers[1:] += extra
    visible[:, numbers[:, None], numbers] |= in_tree & keeps[:, :, None] & keeps[:, None, :]
    visible[:, numbers, 1 : extra + 1] = followed & keeps[..., None]
    visible[:, 1 : extra + 1, 1 : extra + 1] |= up_to & exists[..., None]
    visible[:, 1 : extra + 1, 0] = exists
    return visible


def compact(keys: Tensor, values: Tensor, lengths: Tensor, path: Tensor, counts: Tensor) -> None:
    """Move slot lengths[b] + path[b, j] to slot lengths[b] + j for j < counts[b], in place.

    keys, values: contiguous [L, B, K, S, D]. lengths, counts: int [B]. path: int [B, J], increasing from 0.
    """
    rows = torch.arange(len(lengths), device=keys.device)[:, None]
    step = torch.arange(path.shape[1], device=keys.device)
    source = lengths[:, None] + torch.where(step < counts[:, None], path, step)
    destination = lengths[:, None] + step
    for store in (keys, values):
        store[:, rows, :, destination] = store[:, rows, :, source]
