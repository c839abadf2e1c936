"""Acceptance of tree nodes: the kernels against torch, whose law test_acceptance.py integrates, with equal draws."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from samplers import sampler
from torch import Tensor

pytest.importorskip("triton")

from longspec.inference.acceptance import follow, reject
from longspec.inference.drafting.proposal import Proposal, chain
from longspec.inference.sampling import Sampler
from longspec.kernels.backend import Backend
from longspec.kernels.shared.tree import Draws, new_tree
from longspec.kernels.torch import trees
from longspec.kernels.triton.descent import follow_choices
from longspec.kernels.triton.rejection import reject_children
from longspec.kernels.triton.row_argmax import first_arrival

pytestmark = pytest.mark.kernel


class FixedSampler(Sampler):
    """A sampler with fixed coins [B, N] and noise [B, V]."""

    def __init__(self, coins: Tensor, noise: Tensor) -> None:
        super().__init__()
        self.coins, self.noise = coins, noise

    def uniforms(self, like: Tensor) -> Tensor:
        return self.coins

    def exponentials(self, like: Tensor, step: int = 0, first: int = 0) -> Tensor:
        return self.noise


def sampled_tree(
    batch: int, shape: Sequence[int], vocab: int, seed: int, sharpness: float = 2.0, selected: int | None = None
) -> Proposal:
    """A tree sampled from random distributions, in which some tokens are impossible; all its nodes, or the selected."""
    nodes = 1 + sum(shape)
    inner = 1 + sum(shape[:-1])
    generator = torch.Generator().manual_seed(seed)
    tree = new_tree(batch, nodes, sampled=True, device=torch.device("cpu"))
    q = torch.empty(batch, inner, vocab)
    above = slice(0, 1)
    for width in shape:
        logits = sharpness * torch.randn(batch, above.stop - above.start, vocab, generator=generator)
        logits[torch.rand(logits.shape, generator=generator) < 0.2] = -torch.inf
        logits[..., 0] = 0
        noise = torch.empty(logits.shape, dtype=torch.float64).exponential_(generator=generator)
        trees.grow_level(tree, above, width, logits, None, Draws(noise, q[:, above]))
        above = slice(above.stop, above.stop + width)
    if selected is None:
        return Proposal(tree.tokens, tree.parents, torch.empty(0), tree.visible, len(shape), q)
    levels = torch.arange(len(shape) + 1).repeat_interleave(torch.tensor([1, *shape]))
    few = trees.select_nodes(tree, levels, selected, by_arrival=True)
    return Proposal(few.tokens, few.parents, few.levels, few.visible, len(shape), q, few.wide)


def near(q: Tensor, nodes: int, seed: int) -> Tensor:
    """A target distribution [B, nodes, V] that is similar to q [B, inner nodes, V]."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(q.shape[0], nodes, q.shape[2], generator=generator)
    weights[:, : q.shape[1]] *= q + 0.01 / q.shape[2]
    return weights / weights.sum(-1, keepdim=True)


def draws(batch: int, nodes: int, vocab: int, seed: int) -> tuple[Tensor, Tensor]:
    own = sampler(1.0, batch, 100 * seed)
    return own.uniforms(torch.empty(batch, nodes)), own.exponentials(torch.empty(batch, vocab))


def check_rejection(tree: Proposal, p: Tensor, device: str, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The kernel agrees with torch; returns path, number of steps and bonus token."""
    assert tree.sampled_from is not None
    coins, noise = draws(*tree.tokens.shape, p.shape[-1], seed)
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
