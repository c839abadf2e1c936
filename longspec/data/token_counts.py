"""Frequencies of the tokens in tokenized samples."""

import numpy as np
import torch
from torch import Tensor

from longspec.data.dataset import RowDataset


def token_counts(rows: RowDataset, vocab_size: int) -> Tensor:
    """How often each token occurs in the samples of `rows`, LongTensor [V]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for samples in rows.samples.data.column("input_ids").chunks:
        counts += np.bincount(samples.flatten().to_numpy(), minlength=vocab_size)
    return torch.from_numpy(counts)
