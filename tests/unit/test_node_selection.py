"""Selection and acceptance of tree nodes: the kernels against torch, whose laws test_acceptance.py integrates."""

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from penalty_reference import sampler
from torch import Tensor

pytest.importorskip("triton")

from longspec.inference.acceptance import follow, reject
from longspec.inference.drafting.proposal import Proposal, chain
from longspec.inference.sampling import Sampler
from longspec.kernels.backend import Backend
from longspec.kernels.shared.tree import Branches, Draws, Tree, new_tree
from longspec.kernels.torch import trees
from longspec.kernels.triton.descent import follow_choices
from longspec.kernels.triton.node_selection import select_nodes
from longspec.kernels.triton.rejection import reject_children
from longspec.kernels.triton.row_argmax import first_arrival

pytestmark = pytest.mark.kernel


def grown(
    batch: int, shape: Sequence[int], vocab: int, sampled: bool, seed: int, sharpness: float = 2.0
) -> tuple[Tree, Tensor, Tensor]:
    """A tree of random distributions, in which some tokens are impossible, its levels, and q if it is sampled."""
    generator = torch.Generator().manual_seed(seed)
    tree = new_tree(batch, 1 + sum(shape), sampled, torch.device("cpu"))
    above, q = slice(0, 1), torch.empty(batch, 1 + sum(shape[:-1]), vocab)
    for width in shape:
        logits = sharpness * torch.randn(batch, above.stop - above.start, vocab, generator=generator)
        draws = None
        if sampled:
            logits[torch.rand(logits.shape, generator=generator) < 0.3] = -torch.inf
            logits[..., 0] = 0
            noise = torch.empty(logits.shape, dtype=torch.float64).exponential_(generator=generator)
            draws = Draws(noise, q[:, above])
        trees.grow_level(tree, above, width, logits, None, draws)
        above = slice(above.stop, above.stop + width)
    return tree, torch.arange(len(shape) + 1).repeat_interleave(torch.tensor([1, *shape])), q


def paths(tokens: list[int], parents: list[int]) -> list[tuple[int, ...] | None]:
    """The token path of each node, None for padding."""
    found: list[tuple[int, ...] | None] = [()]
    for token, parent in zip(tokens[1:], parents[1:], strict=True):
        above = found[parent] if parent >= 0 else None
        found.append(None if above is None else (*above, token))
    return found


def test_rounding_does_not_separate_a_node_from_its_parent(device: str) -> None:
    """A chain whose deeper node seems better than the node above it, next to a node between the two."""
    tree = new_tree(1, 4, False, torch.device(device))
    for values, row in ((tree.tokens, [9, 1, 2, 3]), (tree.parents, [-1, 0, 0, 1]), (tree.scores, [0, -2, -1.5, -1])):
        values[0] = torch.tensor(row)
    tree.visible[0, 3, 1] = tree.visible[0, 1:, 0] = True
    levels = torch.tensor([0, 1, 1, 2], device=device)
    for select in (select_nodes, trees.select_nodes):
        assert select(tree, levels, 3, False).tokens.tolist() == [[9, 1, 2]]
        assert select(tree, levels, 4, False).ranks.tolist() == [[0, 2, 1, 3]]


def test_faulty_scores_select_some_nodes(device: str) -> None:
    """Logits that are NaN are reported with the round's tokens; the round itself must not write out of bounds."""
    tree, levels, _ = grown(2, (2, 3), 5, False, 0)
    tree.scores[0, 1:] = torch.nan
    on_device = Tree(*(values.to(device) for values in tree))
    got = select_nodes(on_device, levels.to(device), 4, False)
    expected = trees.select_nodes(tree, levels, 4, False)
    assert torch.equal(got.wide.cpu(), expected.wide) and got.ranks.sort(1).values.tolist() == [[0, 1, 2, 3]] * 2


def random_branches(tree: Tree, depth: int, vocab: int, seed: int) -> Branches:
    """A long and a short branch, which follow paths of the tree for a while."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(vocab, (len(tree.tokens), 2, depth), generator=generator)
    scores = -torch.rand(tokens.shape, generator=generator).cumsum(2)
    for row in range(len(tokens)):
        known = [path for path in paths(tree.tokens[row].tolist(), tree.parents[row].tolist()) if path]
        for number in range(2):
            path = known[int(torch.randint(len(known), (1,), generator=generator))][:depth]
            tokens[row, number, : len(path)] = torch.tensor(path)
        if tokens[row, 0, 0] == tokens[row, 1, 0]:
            tokens[row, 1, 0] = (tokens[row, 0, 0] + 1) % vocab
        scores[row, 0, int(torch.randint(depth + 1, (1,), generator=generator)) :] = -torch.inf
    scores[:, 1, depth // 2 :] = -torch.inf
    scores[0] = -torch.inf
    return Branches(tokens, scores)


@pytest.mark.parametrize("sampled", [False, True], ids=["most probable", "sampled"])
@pytest.mark.parametrize(
    ("shape", "vocab", "nodes", "depth"),
    [
        *[((4, 16, 16), 40, 12, 0), ((2, 3, 4), 5, 7, 0), ((3,), 3, 2, 0), ((2, 6, 6), 3, 14, 0)],
        *[((4, 16, 16), 9, 24, 6), ((2, 3, 4), 5, 12, 6), ((2, 3), 4, 18, 6)],
    ],
)
def test_the_best_nodes_of_a_tree_and_its_branches_are_selected(
    shape: tuple[int, ...], vocab: int, nodes: int, depth: int, sampled: bool, device: str
) -> None:
    """Every path is verified once, with its ancestors, in the old order. Paths of a branch (of at most `depth` nodes)
    come first; next to a sampled tree, all of them. Each prefix of the ranks is a smaller selection."""
    tree, levels, _ = grown(8, shape, vocab, sampled, seed=vocab)
    branches = random_branches(tree, depth, vocab, seed=nodes) if depth else None
    expected = trees.select_nodes(tree, levels, nodes, sampled, branches)
    on_device = [group and type(group)(*(values.to(device) for values in group)) for group in (tree, branches)]
    got = select_nodes(on_device[0], levels.to(device), nodes, sampled, on_device[1])
    for mine, plain in zip(got, expected, strict=True):
        assert torch.equal(mine.cpu(), plain)

    smaller, absorbed = trees.select_nodes(tree, levels, nodes - 1, sampled, branches), 0
    for row in range(8):
        known = paths(tree.tokens[row].tolist(), tree.parents[row].tolist())
        priority = dict(zip(known, (-tree.arrivals if sampled else tree.scores)[row].tolist(), strict=True))
        in_branch: dict[tuple[int, ...], int] = {}
        chains = zip(branches.tokens[row].tolist(), branches.scores[row].tolist(), strict=True) if branches else ()
        for tokens, scores in chains:
            for level, own in enumerate(scores, start=1):
                path = tuple(tokens[:level])
                if own > -math.inf:
                    in_branch[path] = known.index(path) if path in known else 0
                    priority[path] = math.inf if sampled else max(own, priority.get(path, own))
        priority |= {(): math.inf}
        priority.pop(None, None)
        order = sorted(priority, key=lambda path: (-priority[path], path not in in_branch and path != ()))
        selected = paths(expected.tokens[row].tolist(), expected.parents[row].tolist())
        real = [path for path in selected if path is not None]
        assert len(real) == len(set(real)) and set(real) == set(order[:nodes])
        count = sum(expected.in_branch[row].tolist())
        assert all(path in in_branch for path in real[1 : 1 + count])
        of_tree = [known.index(path) for path in real[1 + count :]]
        assert not any(path in in_branch for path in real[1 + count :]) and of_tree == sorted(of_tree)
        for number, path in enumerate(selected):
            if path is None:
                continue
            assert expected.wide[row, number] == (in_branch[path] if path in in_branch else known.index(path))
            assert expected.levels[row, number] == len(path)
            above = {j for j, p in enumerate(selected) if p is not None and p == path[: len(p)]}
            assert set(expected.visible[row, number].nonzero()[:, 0].tolist()) == above
        ranks = expected.ranks[row]
        assert ranks.sort().values.tolist() == list(range(nodes)) and ranks[0] == 0
        if not in_branch:
            assert torch.equal(expected.wide[row][ranks < nodes - 1], smaller.wide[row])
        absorbed += sum(path in known for path in in_branch)
    assert absorbed > 8 or not depth


class FixedSampler(Sampler):
    """A sampler with fixed coins [B, N] and noise [B, V]."""

    def __init__(self, coins: Tensor, noise: Tensor) -> None:
        super().__init__()
        self.coins, self.noise = coins, noise

    def uniforms(self, like: Tensor) -> Tensor:
        return self.coins

    def exponentials(self, like: Tensor, step: int = 0, first: int = 0, stride: int | None = None) -> Tensor:
        return self.noise


def sampled_tree(
    batch: int, shape: Sequence[int], vocab: int, seed: int, sharpness: float = 2.0, selected: int | None = None
) -> Proposal:
    """A tree sampled from random distributions; all its nodes, or the selected."""
    tree, levels, q = grown(batch, shape, vocab, True, seed, sharpness)
    if selected is None:
        return Proposal(tree.tokens, tree.parents, torch.empty(0), tree.visible, len(shape), q)
    few = trees.select_nodes(tree, levels, selected, by_arrival=True)
    return Proposal(few.tokens, few.parents, few.levels, few.visible, len(shape), q, few.wide)


def near(q: Tensor, nodes: int, seed: int) -> Tensor:
    """A target distribution [B, nodes, V] that is similar to q [B, inner nodes, V]."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(q.shape[0], nodes, q.shape[2], generator=generator)
    weights[:, : q.shape[1]] *= q + 0.01 / q.shape[2]
    return weights / weights.sum(-1, keepdim=True)


def drawn(batch: int, nodes: int, vocab: int, seed: int) -> tuple[Tensor, Tensor]:
    own = sampler(1.0, batch, 100 * seed)
    return own.uniforms(torch.empty(batch, nodes)), own.exponentials(torch.empty(batch, vocab))


def check_rejection(tree: Proposal, p: Tensor, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel agrees with torch; returns path, number of steps and bonus token."""
    assert tree.sampled_from is not None
    coins, noise = drawn(*tree.tokens.shape, p.shape[-1], seed)
    accepted = reject(tree, tree.sampled_from, p.clone(), FixedSampler(coins, noise))
    expected = accepted.path, accepted.count, accepted.bonus
    on_device = [x.clone().to(device) for x in (tree.tokens, tree.parents, tree.sampled_from, p, coins)]
    rules = (tree.depth, *(None if x is None else x.to(device) for x in (tree.q_rows, tree.from_lookup)))
    path, count, residual = reject_children(*on_device, *rules)
    check_same((path, count, first_arrival(residual, noise.to(device))), expected)
    return expected


def check_same(got: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for mine, plain in zip(got, expected, strict=True):
        assert torch.equal(mine.cpu(), plain)


@pytest.mark.parametrize(
    ("batch", "shape", "vocab", "selected"),
    [
        *((5, (1,), 2, None), (8, (2,), 7, None), (8, (2, 3, 4), 13, None), (4, (4, 16, 16), 300, None)),
        *((2, (2, 2), 9001, None), (6, (1, 1, 1), 40, None), (8, (2, 3, 4), 13, 8), (8, (4, 16, 16), 13, 8)),
    ],
)
def test_rejection_equals_its_reference(
    batch: int, shape: tuple[int, ...], vocab: int, selected: int | None, device: str
) -> None:
    """For any shape, including levels that the draft cannot fill. Of selected nodes a node's row of q is not its own
    number, and the last level's rows are not the last ones."""
    steps = set()
    for seed in range(3 if selected else 2):
        tree = sampled_tree(batch, shape, vocab, seed, selected=selected)
        assert tree.sampled_from is not None
        q = tree.sampled_from
        if tree.q_rows is not None:
            q = q.gather(1, tree.q_rows.clamp(max=q.shape[1] - 1)[..., None].expand(-1, -1, vocab))
        _, count, _ = check_rejection(tree, near(q, tree.tokens.shape[1], seed), device, seed)
        steps |= set(count.tolist())
    assert len(steps) > (2 if selected else 1), "rejections and acceptances"


@pytest.mark.parametrize("tail", [1e-30, 1e-45])
def test_rejection_keeps_improbable_tokens(tail: float, device: str) -> None:
    """The draft gives almost no probability, down to denormal numbers, to the siblings of its first child; the target
    gives all to them. One of them passes, or the bonus token is one."""
    batch = 24
    q = torch.tensor([1.0, tail, tail, 0.0]).expand(batch, 1, -1)
    p = torch.tensor([[0.0, 0.6, 0.1, 0.3]] * 4).expand(batch, -1, -1)
    tokens, parents = torch.tensor([[9, 0, 2, 1]]).expand(batch, -1), torch.tensor([[-1, 0, 0, 0]]).expand(batch, -1)
    tree = replace(sampled_tree(batch, (3,), 4, 0), tokens=tokens, parents=parents, sampled_from=q)
    path, count, bonus = check_rejection(tree, p, device)
    assert set(path[count > 0, 1].tolist()) == {2, 3} and (bonus != 0).all()


def test_following_choices_equals_its_reference(device: str) -> None:
    """Trees with some of the choices, with padding, and a tree of the root alone."""
    steps = set()
    for seed in (2, 3):
        tree = sampled_tree(16, (2, 4, 5), 6, seed, sharpness=0.5)
        choice = torch.randint(0, 6, tree.tokens.shape, generator=torch.Generator().manual_seed(seed))
        accepted = follow(tree, choice, Backend)
        on_device = [x.to(device) for x in (tree.tokens, tree.parents, choice)]
        check_same(follow_choices(*on_device, tree.depth), (accepted.path, accepted.count, accepted.bonus))
        steps |= set(accepted.count.tolist())
    assert steps == {0, 1, 2, 3}

    root = chain(torch.tensor([[3], [4]], device=device))
    path, count, bonus = follow_choices(root.tokens, root.parents, torch.tensor([[7], [8]], device=device), 0)
    assert path.tolist() == [[0], [0]] and count.tolist() == [0, 0] and bonus.tolist() == [7, 8]
