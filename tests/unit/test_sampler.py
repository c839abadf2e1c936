"""The order of rows: every row once per epoch, and a start at any micro-step."""

import numpy as np
import pytest

from longspec.data.packing import pack
from longspec.train.sampler import ResumableSampler


def walk(rows: int, batch: int, world: int, start: int, stop: int, seed: int = 42) -> list[list[list[int]]]:
    """The micro-batches of each rank."""
    return [list(ResumableSampler(rows, batch, rank, world, seed, start, stop)) for rank in range(world)]


@pytest.mark.parametrize(("rows", "batch", "world"), [(12, 2, 3), (7, 2, 2), (5, 4, 3), (1, 1, 2)])
def test_every_row_comes_once_an_epoch(rows: int, batch: int, world: int) -> None:
    micro_steps = 4 * rows
    ranks = walk(rows, batch, world, 0, micro_steps)
    sequence = [row for step in range(micro_steps) for rank in range(world) for row in ranks[rank][step]]
    for epoch in range(len(sequence) // rows):
        assert sorted(sequence[epoch * rows : (epoch + 1) * rows]) == list(range(rows))


def test_a_later_start_continues_the_same_walk() -> None:
    whole = walk(13, 2, 2, 0, 20)
    assert walk(13, 2, 2, 9, 20) == [rank[9:] for rank in whole]


def test_order_changes_with_epoch_and_seed() -> None:
    first, second = walk(50, 50, 1, 0, 2)[0]
    assert first != second and first != walk(50, 50, 1, 0, 1, seed=43)[0][0]


@pytest.mark.parametrize("seed", [0, 1, 42])
def test_no_epoch_follows_the_order_of_the_corpus(seed: int) -> None:
    """Packed rows are in corpus order, too, and a batch should not come from one document."""
    rows = pack(np.full(600, 64), 64)
    samples = np.concatenate([rows[row] for batch in walk(600, 8, 1, 0, 225, seed)[0] for row in batch])
    for epoch in samples.reshape(3, 600):
        assert abs(np.corrcoef(epoch, np.arange(600))[0, 1]) < 0.2
