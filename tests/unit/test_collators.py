"""Collation: tokens in the loss, and borders of segments."""

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
