"""Collation: tokens in the loss, borders of segments, and unchanged inputs."""

import numpy as np
import pytest
import torch

from longspec.data.collators import Collator

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


@pytest.mark.parametrize("answer_only", [False, True])
def test_a_row_is_the_same_alone_and_in_a_batch(answer_only):
    """The result for a row must not depend on its neighbors: random rows, in batches of 1 and of 5."""
    random = np.random.default_rng(0)
    rows = [
        [
            {"input_ids": random.integers(0, 9, length).astype(np.int32), "prompt_length": int(random.integers(length))}
            for length in random.integers(2, 9, random.integers(1, 4))
        ]
        for _ in range(5)
    ]
    collate = Collator(PAD, answer_only=answer_only, pad_to=32)
    together = collate(rows)
    for number, row in enumerate(rows):
        alone = collate([row])
        assert torch.equal(alone["input_ids"][0], together["input_ids"][number])
        assert torch.equal(alone["labels"][0], together["labels"][number])
        bounds = together["cu_seqlens"]
        inside = bounds[(bounds >= 32 * number) & (bounds <= 32 * (number + 1))] - 32 * number
        assert torch.equal(alone["cu_seqlens"], inside)


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor])
def test_inputs_are_not_changed_nor_shared(kind):
    rows = [[{**segment, "input_ids": kind(segment["input_ids"])} for segment in row] for row in ROWS]
    batch = Collator(PAD, answer_only=True)(rows)
    batch["input_ids"].fill_(0)
    batch["labels"].fill_(0)
    assert [[{**segment, "input_ids": list(segment["input_ids"])} for segment in row] for row in rows] == ROWS
