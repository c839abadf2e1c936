"""Samplers with settings per row, against `Sampler` and transformers' warpers."""

import pytest
import torch
from distributions import p_value

from longspec.inference.sampling import Sampler
from longspec.inference.server.requests import Sampling
from longspec.inference.server.row_sampling import Purpose, RowSampler, RowSettings
from longspec.kernels.shared.watch import Watch

VOCAB = 13
ROWS = [
    Sampling(),
    Sampling(0.7),
    Sampling(1.0, top_k=3),
    Sampling(1.5, top_p=0.6),
    Sampling(0.9, top_p=0.8, top_k=5),
    Sampling(0.0, top_p=0.5, top_k=2),
    Sampling(1.0, top_p=1e-6),
    Sampling(1.0, top_k=VOCAB + 5),
]


def settings() -> RowSettings:
    rows = RowSettings.allocate(torch.arange(len(ROWS), dtype=torch.int32), VOCAB)
    for row, sampling in enumerate(ROWS):
        rows.assign(row, sampling, seed=2**64 - 1 - row, vocab=VOCAB)
    return rows


@pytest.mark.parametrize("nodes", [(), (4,)])
def test_each_row_has_its_own_distribution(nodes: tuple[int, ...]) -> None:
    logits = 3 * torch.randn(len(ROWS), *nodes, VOCAB, generator=torch.Generator().manual_seed(0))
    logits[4, ..., 3] = -torch.inf
    p = RowSampler(settings(), True, Purpose.VERIFY).probabilities(logits)
    for row, sampling in enumerate(ROWS):
        if sampling.temperature == 0:
            expected = torch.nn.functional.one_hot(logits[row].argmax(-1), VOCAB).float()
        else:
            expected = Sampler(sampling.temperature, sampling.top_k, sampling.top_p).probabilities(logits[row, None])[0]
        torch.testing.assert_close(p[row], expected)
        assert torch.equal(p[row] == 0, expected == 0)


def test_a_truncated_round_changes_no_other_row() -> None:
    logits = torch.randn(len(ROWS), 2, VOCAB, generator=torch.Generator().manual_seed(1))
    whole, plain = (RowSampler(settings(), truncates, Purpose.VERIFY).probabilities(logits) for truncates in (1, 0))
    assert torch.equal(whole[[0, 1, 7]], plain[[0, 1, 7]])


@pytest.mark.parametrize("truncates", [False, True])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_logits_without_a_distribution_are_seen(truncates: bool, value: float) -> None:
    for row in range(len(ROWS)):
        logits = torch.zeros(len(ROWS), 2, VOCAB)
        logits[row, 1, 4] = value
        faults = torch.zeros(len(ROWS), dtype=torch.long)
        RowSampler(settings(), truncates, Purpose.VERIFY).choose(logits, Watch(faults, 2))
        assert faults.tolist() == [2 if other == row else 0 for other in range(len(ROWS))]


def test_draws_of_many_seeds_follow_the_distribution() -> None:
    count = 1 << 14
    rows = RowSettings.allocate(torch.zeros(count, dtype=torch.int32), VOCAB)
    rows.seeds.copy_(torch.arange(count))
    rows.greedy.fill_(False)
    law = torch.rand(VOCAB, generator=torch.Generator().manual_seed(2)).log().softmax(-1)
    sampler = RowSampler(rows, False, Purpose.VERIFY)
    draws = sampler.choose(law.log().expand(count, -1))
    assert p_value(torch.bincount(draws, minlength=VOCAB)[None], law[None]) > 1e-3
    sampler.rewind()
    assert torch.equal(sampler.choose(law.log().expand(count, -1)), draws)
    assert not torch.equal(sampler.choose(law.log().expand(count, -1)), draws)
    half = RowSampler(rows.narrow(slice(100, 200)), True, Purpose.VERIFY)
    assert torch.equal(half.choose(law.log().expand(100, -1)), draws[100:200])


def test_noise_of_a_tree_is_the_row_s_own() -> None:
    like, widths = torch.empty(len(ROWS), 5, VOCAB), (1, 4)
    parts = RowSampler(settings(), False, Purpose.DRAFT).exponentials_by_part(like, widths)
    assert [part.shape for part in parts] == [(len(ROWS), width, VOCAB) for width in widths]
    for row in range(len(ROWS)):
        rows = slice(row, row + 1)
        single = RowSampler(settings().narrow(rows), False, Purpose.DRAFT).exponentials_by_part(like[rows], widths)
        assert all(torch.equal(part[rows], own) for part, own in zip(parts, single, strict=True))
    assert (parts[1][0] == 1).all() and (parts[1][1] != parts[0][1]).any()
