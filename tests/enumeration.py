"""Exact integration over chance: a sampler whose every outcome is tried once, with its probability."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from longspec.inference.sampling import Sampler

Result = TypeVar("Result")
Tokens = tuple[int, ...]


class EnumeratingSampler(Sampler):
    """Replays a script of outcomes, and past its end always takes the first one that is possible."""

    def __init__(self, script: list[int]) -> None:
        super().__init__(temperature=1.0, top_k=0, top_p=1.0)
        self.script = script
        self.taken: list[int] = []
        self.options: list[list[int]] = []
        self.probability = 1.0

    def draw(self, weights: Tensor) -> Tensor:
        chosen = [self._decide((row / row.sum()).tolist()) for row in weights.flatten(0, -2)]
        return torch.tensor(chosen).view(weights.shape[:-1])

    def coin(self, probability: Tensor) -> Tensor:
        heads = probability.nan_to_num(0.0).clamp(max=1).flatten().tolist()
        return torch.tensor([self._decide([1 - one, one]) == 1 for one in heads]).view(probability.shape)

    def exponentials(self, like: Tensor) -> Tensor:
        raise NotImplementedError("times are continuous")

    def _decide(self, probabilities: list[float]) -> int:
        possible = [outcome for outcome, probability in enumerate(probabilities) if probability > 0]
        at = len(self.taken)
        outcome = self.script[at] if at < len(self.script) else possible[0]
        self.taken.append(outcome)
        self.options.append(possible)
        self.probability *= probabilities[outcome]
        return outcome


def outcomes(run: Callable[[Sampler], Result]) -> Iterator[tuple[float, Result]]:
    """Every result that `run` can have, path of chance by path of chance, with the path's probability."""
    scripts: list[list[int]] = [[]]
    while scripts:
        script = scripts.pop()
        sampler = EnumeratingSampler(script)
        result = run(sampler)
        yield sampler.probability, result
        for at in range(len(script), len(sampler.taken)):
            scripts += [[*sampler.taken[:at], other] for other in sampler.options[at][1:]]


class RandomLanguage:
    """A distribution of the next token, fp64 [V], for every prefix; some tokens have probability 0."""

    def __init__(self, vocab: int, seed: int, zeros: float = 0.2) -> None:
        self.vocab, self.zeros = vocab, zeros
        self.generator = torch.Generator().manual_seed(seed)
        self.known: dict[Tokens, Tensor] = {}

    def __call__(self, prefix: Tokens) -> Tensor:
        if prefix not in self.known:
            weights = torch.rand(self.vocab, generator=self.generator, dtype=torch.float64) ** 2 + 1e-3
            gone = torch.rand(self.vocab, generator=self.generator) < self.zeros
            gone[torch.randint(self.vocab, (1,), generator=self.generator)] = False
            weights[gone] = 0
            self.known[prefix] = weights / weights.sum()
        return self.known[prefix]

    def sequences(self, length: int, prefix: Tokens = ()) -> dict[Tokens, float]:
        """The probability of each sequence of `length` tokens that begins with `prefix`, given `prefix`."""
        found = {prefix: 1.0}
        for _ in range(length - len(prefix)):
            found = {
                (*head, token): weight * p
                for head, weight in found.items()
                for token, p in enumerate(self(head).tolist())
                if p > 0
            }
        return found


Levels = tuple[tuple[Tokens, ...], ...]


def sampled_trees(language: RandomLanguage, shape: Tokens) -> dict[tuple[Tokens, ...], float]:
    """The law of a tree sampled without replacement: its nodes (token paths, level by level, in order) → probability.

    Complete paths arrive one after another, the next one drawn in proportion to its probability among those that have
    not come; level d keeps the first shape[d - 1] distinct beginnings, below nodes that are kept.
    """
    leaves = language.sequences(len(shape))
    finished: dict[tuple[Tokens, ...], float] = {}
    growing: dict[Levels, float] = {((),) * len(shape): 1.0}
    while growing:
        grown: dict[Levels, float] = {}
        for levels, probability in growing.items():
            after = {leaf: _add(levels, leaf, shape) for leaf in leaves}
            matter = {leaf: leaves[leaf] for leaf in leaves if after[leaf] != levels}
            if not matter:
                finished[sum(levels, ())] = probability
            for leaf, weight in matter.items():
                grown[after[leaf]] = grown.get(after[leaf], 0.0) + probability * weight / sum(matter.values())
        growing = grown
    return finished


def _add(levels: Levels, leaf: Tokens, shape: Tokens) -> Levels:
    found = list(levels)
    for depth, width in enumerate(shape):
        node = leaf[: depth + 1]
        if node not in found[depth]:
            if len(found[depth]) == width:
                break
            found[depth] = (*found[depth], node)
    return tuple(found)
