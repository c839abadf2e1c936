"""Goodness of fit: are these outcomes draws from that distribution?"""

import torch
from torch import Tensor


def p_value(counts: Tensor, law: Tensor) -> float:
    """Pearson's chi-square test, rows independent of each other and taken together.

    counts, law: [rows, outcomes], law's rows sum to 1. 0 where an outcome of probability 0 was counted; outcomes that
    are expected fewer than five times are pooled, as the statistic's own law asks.
    """
    counts, law = counts.double().cpu(), law.double().cpu()
    if counts[law == 0].any():
        return 0.0
    statistic, freedom = 0.0, 0
    for observed, expected in zip(counts, law * counts.sum(1, keepdim=True), strict=True):
        rare = expected < 5
        observed = torch.cat([observed[~rare], observed[rare].sum()[None]])
        expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
        there = expected > 0
        statistic += ((observed - expected)[there].square() / expected[there]).sum().item()
        freedom += int(there.sum()) - 1
    half = torch.tensor([freedom / 2, statistic / 2], dtype=torch.float64)
    return torch.special.gammaincc(half[0], half[1]).item()


def hardest_to_see(law: Tensor, distance: float) -> Tensor:
    """A law [outcomes] at total-variation `distance` whose chi-square from `law` is the least: every probability of one
    half of the mass grows by the same factor, every other one shrinks."""
    order = law.argsort(descending=True)
    sign = torch.empty_like(law)
    balance = 0.0
    for outcome in order.tolist():  # greedily into the lighter half
        sign[outcome] = -1.0 if balance > 0 else 1.0
        balance += sign[outcome].item() * law[outcome].item()
    up, down = law[sign > 0].sum(), law[sign < 0].sum()
    return law * torch.where(sign > 0, 1 + distance / up, 1 - distance / down)
