"""Acceptance emits the target's own distribution: exact sums over all draws, no sampling."""

import itertools

import pytest
import torch
from torch import Tensor
from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from longspec.inference.acceptance import Sampler, accept_sampled_chain, follow
from longspec.inference.drafting.proposal import Proposal, chain

VOCAB = 3


class ScriptedSampler(Sampler):
    """Replays a uniform number per chain step and keeps the distribution that the bonus token is drawn from."""

    def __init__(self, uniforms: Tensor) -> None:
        super().__init__(1.0, 0, 1.0)
        self.uniforms, self.residual = uniforms, torch.empty(0)

    def uniform(self, like: Tensor) -> Tensor:
        return self.uniforms

    def draw(self, probabilities: Tensor) -> Tensor:
        self.residual = probabilities / probabilities.sum(-1, keepdim=True)
        return super().draw(probabilities)


def random_tree(generator: torch.Generator, nodes: int) -> Proposal:
    """Siblings differ in token; parents come before children."""
    parents, tokens, levels = [-1], [0], [0]
    while len(parents) < nodes:
        parent = int(torch.randint(len(parents), (1,), generator=generator))
        token = int(torch.randint(VOCAB, (1,), generator=generator))
        if (parent, token) not in zip(parents, tokens, strict=True) and levels[parent] < 3:
            parents.append(parent)
            tokens.append(token)
            levels.append(levels[parent] + 1)
    empty = torch.zeros(1, nodes, nodes, dtype=torch.bool)
    return Proposal(torch.tensor([tokens]), torch.tensor([parents]), torch.tensor(levels), empty, max(levels))


@pytest.mark.parametrize("seed", range(8))
def test_tree_descent_emits_the_targets_distribution(seed: int) -> None:
    """Summed over all draws at all nodes, P(emitted sequence) is the product of the target's probabilities."""
    generator = torch.Generator().manual_seed(seed)
    tree = random_tree(generator, nodes=6)
    p = torch.rand(6, VOCAB, generator=generator, dtype=torch.float64)
    p /= p.sum(-1, keepdim=True)
    draws = torch.tensor(list(itertools.product(range(VOCAB), repeat=6)))
    weight = p[torch.arange(6), draws].prod(-1)
    batch = Proposal(
        tree.tokens.expand(len(draws), -1),
        tree.parents.expand(len(draws), -1),
        tree.levels,
        tree.visible,
        tree.depth,
    )
    accepted = follow(batch, draws)
    emitted: dict[tuple[int, ...], float] = {}
    columns = (column.tolist() for column in (accepted.path, accepted.count, accepted.bonus, weight))
    for path, count, bonus, w in zip(*columns, strict=True):
        sequence = (*(tree.tokens[0, n].item() for n in path[1 : count + 1]), bonus)
        emitted[sequence] = emitted.get(sequence, 0.0) + w
    assert sum(emitted.values()) == pytest.approx(1, abs=1e-9)
    for sequence, probability in emitted.items():
        assert probability == pytest.approx(_target_probability(tree, p, sequence), abs=1e-9), sequence


def _target_probability(tree: Proposal, p: Tensor, sequence: tuple[int, ...]) -> float:
    node, probability = 0, 1.0
    for step, token in enumerate(sequence):
        probability *= p[node, token].item()
        if step < len(sequence) - 1:
            node = next(n for n in range(6) if tree.parents[0, n] == node and n > 0 and tree.tokens[0, n] == token)
    return probability


@pytest.mark.parametrize("seed", range(8))
def test_sampled_chain_emits_the_targets_distribution(seed: int) -> None:
    """One drafted token, summed over the draft's draws and both outcomes of the coin: token 1 ~ p_0, token 2 ~ p_1."""
    generator = torch.Generator().manual_seed(seed)
    p = torch.rand(1, 2, VOCAB, generator=generator, dtype=torch.float64) + 0.01
    q = torch.rand(1, 1, VOCAB, generator=generator, dtype=torch.float64) + 0.01
    p, q = p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)
    first = torch.zeros(VOCAB, dtype=torch.float64)
    for token in range(VOCAB):
        proposal = chain(torch.tensor([[0, token]]), q)
        ratio = min(1.0, (p[0, 0, token] / q[0, 0, token]).item())
        for uniform, weight in ((ratio - 1e-9, ratio), (ratio + 1e-9, 1 - ratio)):
            if weight <= 0:
                continue
            sampler = ScriptedSampler(torch.tensor([[uniform]], dtype=torch.float64))
            accepted = accept_sampled_chain(proposal, p, sampler)
            assert accepted.count.item() == (uniform < ratio)
            if accepted.count.item():
                first[token] += q[0, 0, token] * weight
                torch.testing.assert_close(sampler.residual[0], p[0, 1])
            else:
                first += q[0, 0, token] * weight * sampler.residual[0]
    torch.testing.assert_close(first, p[0, 0], rtol=0, atol=1e-9)


def test_chain_counts_up_to_the_first_rejection() -> None:
    """A token after a rejected one is never kept, and the bonus comes from the distribution at the rejection."""
    p = torch.tensor([[[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 0, 0]]])
    q = torch.tensor([[[1.0, 0, 0], [0, 0, 1], [0, 0, 1]]])
    sampler = ScriptedSampler(torch.full((1, 3), 0.5))
    accepted = accept_sampled_chain(chain(torch.tensor([[9, 0, 2, 2]]), q), p, sampler)
    assert accepted.count.tolist() == [1] and accepted.bonus.tolist() == [1]


def test_probabilities_follow_transformers_order_of_warpers() -> None:
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(0))
    theirs = LogitsProcessorList([TemperatureLogitsWarper(0.6), TopKLogitsWarper(5), TopPLogitsWarper(0.8)])
    expected = theirs(torch.zeros(4, 1, dtype=torch.long), logits).softmax(-1)
    torch.testing.assert_close(Sampler(0.6, 5, 0.8).probabilities(logits[None])[0], expected)


def test_greedy_follows_the_argmax_down_the_deepest_path() -> None:
    """Root with children 1 and 2, child 2 with child 1: path 2 → 1, then the bonus token."""
    tree = Proposal(
        torch.tensor([[0, 1, 2, 1]]),
        torch.tensor([[-1, 0, 0, 2]]),
        torch.tensor([0, 1, 1, 2]),
        torch.zeros(1, 4, 4, dtype=torch.bool),
        2,
    )
    accepted = follow(tree, torch.tensor([[2, 0, 1, 0]]))
    assert accepted.path.tolist() == [[0, 2, 3]] and accepted.count.tolist() == [2] and accepted.bonus.tolist() == [0]
