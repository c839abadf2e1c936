"""Selection of the nodes to be verified: the kernel against its reference, and both against a plain search."""

import math

import pytest
import torch

pytest.importorskip("triton")

from longspec.kernels.shared.tree import Branches, Draws, Tree, new_tree
from longspec.kernels.torch import trees
from longspec.kernels.triton.node_selection import select_nodes

pytestmark = pytest.mark.kernel


def grown(batch: int, shape: tuple[int, ...], vocab: int, sampled: bool, seed: int) -> tuple[Tree, torch.Tensor]:
    """A tree of random distributions, in which some tokens are impossible, and its levels."""
    generator = torch.Generator().manual_seed(seed)
    tree = new_tree(batch, 1 + sum(shape), sampled, torch.device("cpu"))
    above = slice(0, 1)
    for width in shape:
        logits = 2 * torch.randn(batch, above.stop - above.start, vocab, generator=generator)
        if sampled:
            logits[torch.rand(logits.shape, generator=generator) < 0.3] = -torch.inf
            logits[..., 0] = 0
            noise = torch.empty(logits.shape, dtype=torch.float64).exponential_(generator=generator)
            trees.grow_level(tree, above, width, logits, None, Draws(noise, torch.empty(logits.shape)))
        else:
            trees.grow_level(tree, above, width, logits, None)
        above = slice(above.stop, above.stop + width)
    levels = torch.arange(len(shape) + 1).repeat_interleave(torch.tensor([1, *shape]))
    return tree, levels


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
    tree, levels = grown(2, (2, 3), 5, False, 0)
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
        for chain in range(2):
            path = known[int(torch.randint(len(known), (1,), generator=generator))][:depth]
            tokens[row, chain, : len(path)] = torch.tensor(path)
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
    tree, levels = grown(8, shape, vocab, sampled, seed=vocab)
    branches = random_branches(tree, depth, vocab, seed=nodes) if depth else None
    expected = trees.select_nodes(tree, levels, nodes, sampled, branches)
    on_device = [group and type(group)(*(values.to(device) for values in group)) for group in (tree, branches)]
    got = select_nodes(on_device[0], levels.to(device), nodes, sampled, on_device[1])
    for mine, plain in zip(got, expected, strict=True):
        assert torch.equal(mine.cpu(), plain)

    smaller, absorbed = trees.select_nodes(tree, levels, nodes - 1, sampled, branches), 0
    for row in range(8):
        known = paths(tree.tokens[row].tolist(), tree.parents[row].tolist())
        priority: dict[tuple[int, ...] | None, float] = {}
        for path, own in zip(known, (-tree.arrivals if sampled else tree.scores)[row].tolist(), strict=True):
            priority[path] = own
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
