"""The vocabulary list of a fresh draft (see `models.draft_vocabulary`)."""

import logging

import numpy as np
import torch
from torch import Tensor

from longspec.data.dataset import RowDataset
from longspec.errors import UserError
from longspec.models.draft_vocabulary import most_frequent
from longspec.models.target_files import read_config
from longspec.models.target_split import vocabulary_rows
from longspec.train.config_schema import TrainConfig
from longspec.train.inputs import Inputs

logger = logging.getLogger(__name__)


def fresh_vocabulary(config: TrainConfig, inputs: Inputs) -> Tensor | None:
    """The `model.draft_vocabulary` most frequent tokens of the training data, LongTensor [Vd], ascending.

    EOS and the tokenizer's added and special tokens are preferred, if they occur. None without the key. config: that of
    this machine, which names the target's folder.
    """
    size = config.model.draft_vocabulary
    if size is None:
        return None
    tokenizer = inputs.tokenizer
    always = {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    if config.eos_token_id is not None:
        always.add(config.eos_token_id)
    counts = token_counts(inputs.rows, read_config(config.model_name_or_path).vocab_size)
    tokens = most_frequent(counts, size, always)
    covered = 100 * counts[tokens].sum() / counts.sum()
    logger.info("draft vocabulary: %d tokens, %.2f%% of those in the training data", size, covered)
    return tokens


def token_counts(rows: RowDataset, vocab_size: int) -> Tensor:
    """How often each token occurs in the samples of `rows`, LongTensor [V]."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    # Chunk by chunk, because the samples stay in a memory-mapped table.
    for samples in rows.samples.data.column("input_ids").chunks:
        counts += np.bincount(samples.flatten().to_numpy(), minlength=vocab_size)
    return torch.from_numpy(counts)


def check_list_split(tokens: Tensor, vocab_size: int, tp_size: int) -> None:
    """Raise UserError unless each rank that shares a target has rows of the list `tokens`, LongTensor [Vd]."""
    for rank in range(tp_size):
        rows = vocabulary_rows(vocab_size, rank, tp_size)
        if not ((tokens >= rows.start) & (tokens < rows.stop)).any():
            raise UserError(
                f"config key tp_size: {tp_size}; the draft's vocabulary of {len(tokens)} tokens has none of rank "
                f"{rank}'s, {rows.start} … {rows.stop - 1}; use a smaller tp_size or a larger vocabulary"
            )
