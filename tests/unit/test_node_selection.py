"""Selection of the nodes to be verified: the kernel against its reference, and both against a plain search."""

import os

import pytest
import torch

pytest.importorskip("triton")

from longspec.kernels.decoding import tree_reference
from longspec.kernels.decoding.node_selection import select_nodes
from longspec.kernels.decoding.tree import Tree, new_tree
from longspec.kernels.decoding.vocabulary import best_children, sampled_children

DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs interpreter")
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


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
            sampled_children(tree, above, width, logits, 1.0, noise, torch.empty(logits.shape))
        else:
            best_children(tree, above, width, logits, 1.0)
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


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("sampled", [False, True], ids=["most probable", "sampled"])
@pytest.mark.parametrize(
    ("shape", "vocab", "nodes"), [((4, 16, 16), 40, 12), ((2, 3, 4), 5, 7), ((3,), 3, 2), ((2, 6, 6), 3, 14)]
)
def test_the_best_nodes_are_selected(
    shape: tuple[int, ...], vocab: int, nodes: int, sampled: bool, device: str
) -> None:
    """In their old order, with their ancestors; and every prefix of the ranks is a smaller selection."""
    tree, levels = grown(6, shape, vocab, sampled, seed=len(shape) + vocab)
    expected = tree_reference.select_nodes(tree, levels, nodes, sampled)
    on_device = Tree(*(values.to(device) for values in tree))
    for mine, plain in zip(select_nodes(on_device, levels.to(device), nodes, sampled), expected, strict=True):
        assert torch.equal(mine.cpu(), plain)

    for row in range(6):
        merit = (-tree.arrivals if sampled else tree.scores)[row].tolist()
        known = paths(tree.tokens[row].tolist(), tree.parents[row].tolist())
        real = sorted((node for node, path in enumerate(known) if path is not None), key=lambda node: -merit[node])
        selected = paths(expected.tokens[row].tolist(), expected.parents[row].tolist())
        filled = [node for node, path in enumerate(selected) if path is not None]
        best = sorted(real[:nodes])
        assert expected.wide[row, filled].tolist() == best
        assert [selected[node] for node in filled] == [known[node] for node in best]
        assert expected.levels[row, filled].tolist() == [len(known[node] or ()) for node in best]
        for i, path in enumerate(selected):
            above = {j for j, p in enumerate(selected) if path and p is not None and p == path[: len(p)]}
            assert set(expected.visible[row, i].nonzero()[:, 0].tolist()) == above | {i}
        ranks = expected.ranks[row].tolist()
        assert sorted(ranks) == list(range(nodes)) and ranks[0] == 0
        smaller = tree_reference.select_nodes(tree, levels, nodes - 1, sampled)
        assert torch.equal(expected.wide[row][expected.ranks[row] < nodes - 1], smaller.wide[row])


@pytest.mark.parametrize("device", DEVICES)
def test_rounding_does_not_separate_a_node_from_its_parent(device: str) -> None:
    """A chain whose deeper node seems better than the node above it, next to a node between the two."""
    tree = new_tree(1, 4, False, torch.device(device))
    for values, row in ((tree.tokens, [9, 1, 2, 3]), (tree.parents, [-1, 0, 0, 1]), (tree.scores, [0, -2, -1.5, -1])):
        values[0] = torch.tensor(row)
    tree.visible[0, 3, 1] = tree.visible[0, 1:, 0] = True
    levels = torch.tensor([0, 1, 1, 2], device=device)
    for select in (select_nodes, tree_reference.select_nodes):
        assert select(tree, levels, 3, False).tokens.tolist() == [[9, 1, 2]]
        assert select(tree, levels, 4, False).ranks.tolist() == [[0, 2, 1, 3]]


@pytest.mark.parametrize("device", DEVICES)
def test_faulty_scores_select_some_nodes(device: str) -> None:
    """Logits that are NaN are reported with the round's tokens; the round itself must not write out of bounds."""
    tree, levels = grown(2, (2, 3), 5, False, 0)
    tree.scores[0, 1:] = torch.nan
    on_device = Tree(*(values.to(device) for values in tree))
    got = select_nodes(on_device, levels.to(device), 4, False)
    expected = tree_reference.select_nodes(tree, levels, 4, False)
    assert torch.equal(got.wide.cpu(), expected.wide) and got.ranks.sort(1).values.tolist() == [[0, 1, 2, 3]] * 2
