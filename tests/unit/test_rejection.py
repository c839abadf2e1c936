"""The walks down a tree: each kernel against the plain version, fed the same choices, coins and noise."""

import os
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from longspec.inference.acceptance import Accepted, follow, reject
from longspec.inference.drafting.proposal import Proposal, chain
from longspec.inference.sampling import Sampler
from longspec.kernels import choice
from longspec.kernels.descent import follow_choices
from longspec.kernels.rejection import reject_children
from longspec.kernels.vocabulary import new_tree, sampled_children

DEVICES = [
    pytest.param(
        "cpu", marks=pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="needs interpreter")
    ),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


class FixedSampler(Sampler):
    """Has its coins [B, N] and its noise [B, V] from outside."""

    def __init__(self, coins: Tensor, noise: Tensor) -> None:
        super().__init__(1.0, 0, 1.0)
        self.coins, self.noise = coins, noise

    def uniforms(self, like: Tensor) -> Tensor:
        return self.coins

    def exponentials(self, like: Tensor) -> Tensor:
        return self.noise


def sampled_tree(batch: int, shape: Sequence[int], vocab: int, seed: int, sharpness: float = 2.0) -> Proposal:
    """A tree sampled from random distributions, in which some tokens cannot be."""
    nodes, inner = 1 + sum(shape), 1 + sum(shape[:-1])
    generator = torch.Generator().manual_seed(seed)
    tree = new_tree(batch, nodes, sampled=True, device=torch.device("cpu"))
    q = torch.empty(batch, inner, vocab)
    above = slice(0, 1)
    for width in shape:
        logits = sharpness * torch.randn(batch, above.stop - above.start, vocab, generator=generator)
        logits[torch.rand(logits.shape, generator=generator) < 0.2] = -torch.inf
        logits[..., 0] = 0
        noise = torch.empty(logits.shape, dtype=torch.float64).exponential_(generator=generator)
        sampled_children(tree, above, width, logits, 1.0, noise, q[:, above])
        above = slice(above.stop, above.stop + width)
    return Proposal(tree.tokens, tree.parents, torch.empty(0), tree.visible, tuple(shape), q)


def near(q: Tensor, nodes: int, seed: int) -> Tensor:
    """A target [B, nodes, V] that is not far from q [B, inner nodes, V]."""
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(q.shape[0], nodes, q.shape[2], generator=generator)
    weights[:, : q.shape[1]] *= q + 0.01 / q.shape[2]
    return weights / weights.sum(-1, keepdim=True)


def draws(batch: int, nodes: int, vocab: int, seed: int) -> tuple[Tensor, Tensor]:
    sampler = Sampler(1.0, 0, 1.0, torch.Generator().manual_seed(seed))
    return sampler.uniforms(torch.empty(batch, nodes)), sampler.exponentials(torch.empty(batch, vocab))


def check_rejection(tree: Proposal, p: Tensor, device: str, seed: int = 0) -> Accepted:
    assert tree.sampled_from is not None
    coins, noise = draws(*tree.tokens.shape, p.shape[-1], seed)
    expected = reject(tree, tree.sampled_from, p, FixedSampler(coins, noise))
    tensors = (tree.tokens, tree.parents, tree.sampled_from, p, coins)
    path, count, left = reject_children(*(x.clone().to(device) for x in tensors), tree.depth)
    check_same((path, count, choice.argmax(left, noise.to(device))), expected)
    return expected


def check_same(found: tuple[Tensor, Tensor, Tensor], expected: Accepted) -> None:
    for mine, plain in zip(found, (expected.path, expected.count, expected.bonus), strict=True):
        assert torch.equal(mine.cpu(), plain)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("batch", "shape", "vocab"),
    [(5, (1,), 2), (8, (2,), 7), (8, (2, 3, 4), 13), (4, (4, 16, 16), 300), (2, (2, 2), 9001), (6, (1, 1, 1), 40)],
)
def test_rejection_equals_the_plain_version(batch: int, shape: tuple[int, ...], vocab: int, device: str) -> None:
    """Whatever the shape; levels that the draft cannot fill included. Every number of steps is seen."""
    steps = set()
    for seed in range(4):
        tree = sampled_tree(batch, shape, vocab, seed)
        accepted = check_rejection(tree, near(tree.sampled_from, tree.tokens.shape[1], seed), device, seed)  # type: ignore[arg-type]
        steps |= set(accepted.count.tolist())
    assert len(steps) > 1


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("tail", [1e-30, 1e-39, 1e-45])
def test_rejection_keeps_what_is_improbable(tail: float, device: str) -> None:
    """The draft leaves next to nothing to the siblings of its favourite, down to denormal numbers, and the target wants
    them alone: one passes, or the bonus token is one."""
    batch = 64
    q = torch.tensor([1.0, tail, tail, 0.0]).expand(batch, 1, -1)
    p = torch.tensor([[0.0, 0.6, 0.1, 0.3]] * 4).expand(batch, -1, -1)
    tokens, parents = torch.tensor([[9, 0, 2, 1]]).expand(batch, -1), torch.tensor([[-1, 0, 0, 0]]).expand(batch, -1)
    tree = replace(sampled_tree(batch, (3,), 4, 0), tokens=tokens, parents=parents, sampled_from=q)
    accepted = check_rejection(tree, p, device)
    assert set(accepted.path[accepted.count > 0, 1].tolist()) == {2, 3} and (accepted.bonus != 0).all()


@pytest.mark.parametrize("device", DEVICES)
def test_a_draft_that_is_the_target_is_always_accepted(device: str) -> None:
    """Down to the last level: p/q is 1 at the first child of each node."""
    tree = sampled_tree(8, (1, 1), 20, 0)
    p = torch.cat([tree.sampled_from, tree.sampled_from[:, :1]], 1)  # type: ignore[index]
    assert (check_rejection(tree, p, device).count == 2).all()


@pytest.mark.parametrize("device", DEVICES)
def test_following_equals_the_plain_version(device: str) -> None:
    """Trees that hold a part of the choices, fillers, and a tree of the root alone."""
    steps = set()
    for seed in range(6):
        tree = sampled_tree(16, (2, 4, 5), 6, seed, sharpness=0.5)
        chosen = torch.randint(0, 6, tree.tokens.shape, generator=torch.Generator().manual_seed(seed))
        expected = follow(tree, chosen)
        tensors = (tree.tokens, tree.parents, chosen)
        check_same(follow_choices(*(x.to(device) for x in tensors), tree.depth), expected)
        steps |= set(expected.count.tolist())
    assert steps == {0, 1, 2, 3}
    root = chain(torch.tensor([[3], [4]], device=device))
    path, count, bonus = follow_choices(root.tokens, root.parents, torch.tensor([[7], [8]], device=device), 0)
    assert path.tolist() == [[0], [0]] and count.tolist() == [0, 0] and bonus.tolist() == [7, 8]
