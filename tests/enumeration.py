"""Exact enumeration of a random procedure, with the probability of each outcome, and goodness of fit of samples."""

from collections.abc import Callable, Iterator
from typing import TypeVar

import torch
from torch import Tensor

from longspec.inference.row_settings import RowSettings
from longspec.inference.sampling import Sampler, SamplingKind

Result = TypeVar("Result")
Tokens = tuple[int, ...]


class _Coins:
    """In place of a tensor of uniform numbers: each comparison of one with a probability is decided."""

    def __init__(self, decide: Callable[[list[float]], int]) -> None:
        self.decide = decide

    def __getitem__(self, _: object) -> "_Coins":
        return self

    def __lt__(self, probability: Tensor | float) -> bool:
        heads = torch.as_tensor(probability).nan_to_num(0.0).clamp(max=1).item()
        return self.decide([1 - heads, heads]) == 1


class EnumeratingSampler(Sampler):
    """Replays a script of outcomes. After its end, takes the first outcome that has a positive probability."""

    def __init__(self, script: list[int]) -> None:
        super().__init__(SamplingKind("sampled"), RowSettings.allocate(1, torch.device("cpu")))
        self.script = script
        self.taken: list[int] = []
        self.options: list[list[int]] = []
        self.probability = 1.0

    def draw(self, weights: Tensor, step: int = 0) -> Tensor:
        chosen = [self._decide((row / row.sum()).tolist()) for row in weights.flatten(0, -2)]
        return torch.tensor(chosen).view(weights.shape[:-1])

    def uniforms(self, like: Tensor) -> Tensor:
        return _Coins(self._decide)  # type: ignore[return-value]

    def exponentials(self, like: Tensor, step: int = 0, first: int = 0, stride: int | None = None) -> Tensor:
        raise NotImplementedError("exponential variables are continuous and cannot be enumerated")

    def _decide(self, probabilities: list[float]) -> int:
        possible = [outcome for outcome, probability in enumerate(probabilities) if probability > 0]
        draw = len(self.taken)
        outcome = self.script[draw] if draw < len(self.script) else possible[0]
        self.taken.append(outcome)
        self.options.append(possible)
        self.probability *= probabilities[outcome]
        return outcome


def outcomes(run: Callable[[Sampler], Result]) -> Iterator[tuple[float, Result]]:
    """The probability and the result of `run` for every sequence of outcomes that its sampler can draw."""
    scripts: list[list[int]] = [[]]
    while scripts:
        script = scripts.pop()
        sampler = EnumeratingSampler(script)
        result = run(sampler)
        yield sampler.probability, result
        for draw in range(len(script), len(sampler.taken)):
            scripts += [[*sampler.taken[:draw], other] for other in sampler.options[draw][1:]]


class RandomLanguage:
    """Random next-token distributions, fp64 [V], one per prefix. Some tokens have probability 0."""

    def __init__(self, vocab: int, seed: int, zeros: float = 0.2) -> None:
        self.vocab, self.zeros = vocab, zeros
        self.generator = torch.Generator().manual_seed(seed)
        self.known: dict[Tokens, Tensor] = {}

    def __call__(self, prefix: Tokens) -> Tensor:
        if prefix not in self.known:
            weights = torch.rand(self.vocab, generator=self.generator, dtype=torch.float64) ** 2 + 1e-3
            impossible = torch.rand(self.vocab, generator=self.generator) < self.zeros
            impossible[torch.randint(self.vocab, (1,), generator=self.generator)] = False
            weights[impossible] = 0
            self.known[prefix] = weights / weights.sum()
        return self.known[prefix]

    def sequences(self, length: int, prefix: Tokens = ()) -> dict[Tokens, float]:
        """The conditional probability, given `prefix`, of each sequence of `length` tokens that starts with it."""
        sequences = {prefix: 1.0}
        for _ in range(length - len(prefix)):
            sequences = {
                (*head, token): probability * p
                for head, probability in sequences.items()
                for token, p in enumerate(self(head).tolist())
                if p > 0
            }
        return sequences


Levels = tuple[tuple[Tokens, ...], ...]
Arrivals = tuple[tuple[Tokens, ...], ...]
"""Groups of nodes that arrive together, in order of arrival."""


def sampled_trees(language: RandomLanguage, shape: Tokens) -> dict[tuple[Tokens, ...], float]:
    """Probability of each tree sampled without replacement. A tree is the tuple of its nodes, level by level and in the
    order of sampling; a node is its token path.

    Complete paths are sampled one after another without replacement, each in proportion to its probability among those
    that remain. Level d keeps the first shape[d - 1] distinct beginnings of length d whose parents are kept.
    """
    empty: Levels = ((),) * len(shape)
    law = _sampling(language, len(shape), empty, lambda levels, leaf: _add(levels, leaf, shape))
    return {sum(levels, ()): probability for levels, probability in law.items()}


def arrivals(language: RandomLanguage, shape: Tokens) -> dict[Arrivals, float]:
    """Probability of each order in which the nodes of a tree of `sampled_trees` arrive: a node arrives with the first
    complete path that starts with it."""

    def add(groups: Arrivals, leaf: Tokens) -> Arrivals:
        present = sum(groups, ())
        levels = tuple(tuple(node for node in present if len(node) == depth) for depth in range(1, len(shape) + 1))
        new = tuple(node for level in _add(levels, leaf, shape) for node in level if node not in present)
        return (*groups, new) if new else groups

    return _sampling(language, len(shape), (), add)


State = TypeVar("State")


def _sampling(
    language: RandomLanguage, depth: int, start: State, add: Callable[[State, Tokens], State]
) -> dict[State, float]:
    """The law of the state after all complete paths of length `depth` were sampled and added."""
    leaves = language.sequences(depth)
    finished: dict[State, float] = {}
    growing: dict[State, float] = {start: 1.0}
    while growing:
        grown: dict[State, float] = {}
        for state, probability in growing.items():
            after = {leaf: add(state, leaf) for leaf in leaves}
            # Paths that leave the tree unchanged do not affect the law of the next change.
            changing = {leaf: leaves[leaf] for leaf in leaves if after[leaf] != state}
            if not changing:
                finished[state] = probability
            total = sum(changing.values())
            for leaf, weight in changing.items():
                grown[after[leaf]] = grown.get(after[leaf], 0.0) + probability * weight / total
        growing = grown
    return finished


def _add(levels: Levels, leaf: Tokens, shape: Tokens) -> Levels:
    """The tree `levels` after the complete path `leaf` was sampled."""
    extended = list(levels)
    for depth, width in enumerate(shape):
        node = leaf[: depth + 1]
        if node not in extended[depth]:
            if len(extended[depth]) == width:
                break
            extended[depth] = (*extended[depth], node)
    return tuple(extended)


def p_value(counts: Tensor, law: Tensor) -> float:
    """p-value of Pearson's chi-square test over all rows, which are independent of each other.

    counts, law: [rows, outcomes]; law holds probabilities, and each row sums to 1. Returns 0.0 if an outcome of
    probability 0 was counted. Outcomes with an expected count below five are pooled, because the statistic follows the
    chi-square distribution only for larger counts.
    """
    counts, law = counts.double().cpu(), law.double().cpu()
    if counts[law == 0].any():
        return 0.0
    statistic, degrees_of_freedom = 0.0, 0
    for observed, expected in zip(counts, law * counts.sum(1, keepdim=True), strict=True):
        rare = expected < 5
        observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
        possible = expected > 0
        statistic += ((observed - expected)[possible].square() / expected[possible]).sum().item()
        degrees_of_freedom += int(possible.sum()) - 1
    # The survival function of chi-square with k degrees of freedom is the regularized upper gamma Q(k / 2, x / 2).
    k_half, x_half = torch.tensor([degrees_of_freedom / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(k_half, x_half).item()


def hardest_to_see(law: Tensor, distance: float) -> Tensor:
    """The distribution [outcomes] at total-variation distance `distance` that a chi-square test detects least.

    The outcomes are divided into two sets of about equal mass; the probabilities of one set grow by a common factor,
    those of the other shrink.
    """
    order = law.argsort(descending=True)
    sign = torch.empty_like(law)
    balance = 0.0
    for outcome in order.tolist():  # greedily into the set with less mass
        sign[outcome] = -1.0 if balance > 0 else 1.0
        balance += sign[outcome].item() * law[outcome].item()
    up, down = law[sign > 0].sum(), law[sign < 0].sum()
    return law * torch.where(sign > 0, 1 + distance / up, 1 - distance / down)
