"""Goodness of fit: tests whether outcomes are samples from a distribution."""

import torch
from torch import Tensor


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
