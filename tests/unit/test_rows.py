"""Rows of training: packing by best fit, collation, and their order."""

import numpy as np
import pytest
import torch

from longspec.data.collators import Collator
from longspec.data.packing import pack
from longspec.train.sampler import ResumableSampler


def naive_best_fit(lengths, max_length):
    """The tokens of each row of a best-fit-decreasing packing that looks at every open row, ascending."""
    room = []
    for length in sorted(lengths, reverse=True):
        fitting = [row for row in range(len(room)) if room[row] >= length]
        if not fitting:
            room.append(max_length)
            fitting = [len(room) - 1]
        best = min(fitting, key=lambda row: room[row])
        room[best] -= length
    return sorted(max_length - left for left in room)


@pytest.mark.parametrize("max_length", [7, 64, 1024])
def test_rows_are_those_of_the_naive_best_fit(max_length):
    for seed in range(5):
        lengths = np.random.default_rng(seed).integers(1, max_length + 1, 300)
        rows = pack(lengths, max_length)
        assert sorted(rows.samples.tolist()) == list(range(len(lengths)))
        filled = [int(lengths[row].sum()) for row in rows]
        assert sorted(filled) == naive_best_fit(lengths.tolist(), max_length)


PAD = EOS = 2  # one id for both, as many tokenizers have it
ROWS = [
    [{"input_ids": [5, 6, 7, EOS], "prompt_length": 2}, {"input_ids": [8, 9, EOS], "prompt_length": 0}],
    [{"input_ids": [3, 4, EOS], "prompt_length": 1}],
]
X = -100


def test_every_real_token_but_each_first_one_is_learnt():
    batch = Collator(PAD)(ROWS)
    assert batch["input_ids"].tolist() == [[5, 6, 7, EOS, 8, 9, EOS], [3, 4, EOS, PAD, PAD, PAD, PAD]]
    assert batch["labels"].tolist() == [[X, 6, 7, EOS, X, 9, EOS], [X, 4, EOS, X, X, X, X]]
    answers = Collator(PAD, answer_only=True)(ROWS)["labels"]
    assert answers.tolist() == [[X, X, 7, EOS, X, 9, EOS], [X, 4, EOS, X, X, X, X]]


def test_segments_cover_the_flattened_batch_padding_included():
    batch = Collator(PAD, pad_to=8)(ROWS)
    assert Collator(PAD)(ROWS)["cu_seqlens"].tolist() == [0, 4, 7, 10, 14]
    assert batch["cu_seqlens"].tolist() == [0, 4, 7, 8, 11, 16] and batch["cu_seqlens"].dtype == torch.int32
    for name in ("input_ids", "labels"):
        assert batch[name].shape == (2, 8) and batch[name].dtype == torch.int64


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
