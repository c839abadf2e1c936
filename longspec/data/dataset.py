"""The data pipeline, from JSONL files to rows of token ids."""

import logging

import numpy as np
import torch

from longspec.data import lines, packing
from longspec.data.aligners import common_form_aligner
from longspec.data.collators import Segment
from longspec.data.record_fields import unread_note
from longspec.data.tokenization import NO_ANSWER, NO_ROOM, Tokenize
from longspec.errors import UserError
from longspec.extras import extra

with extra("train"):
    from datasets import Dataset

logger = logging.getLogger(__name__)


class RowDataset(torch.utils.data.Dataset[list[Segment]]):
    """Rows of segments from a memory-mapped table of tokenized samples.

    Item r is a list of segments (`input_ids` int64 [T] and `prompt_length`) with at most max_length tokens in total.
    """

    def __init__(self, samples: Dataset, rows: packing.Rows):
        self.samples = samples.with_format("numpy", columns=["input_ids", "prompt_length"])
        self.names = samples.with_format(None, columns=["id"])
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def ids(self, row: int) -> list[str]:
        """The ids of a row's samples."""
        return self.names[self.rows[row].tolist()]["id"]

    def __getitem__(self, row: int) -> list[Segment]:
        samples = self.samples[self.rows[row].tolist()]
        return [
            {"input_ids": ids, "prompt_length": int(length)}
            for ids, length in zip(samples["input_ids"], samples["prompt_length"], strict=True)
        ]


def build_dataset(
    files: lines.Files, tokenize: Tokenize, *, pack: bool, num_proc: int = 1, cache_dir: str | None = None
) -> RowDataset:
    """Rows for the collator from JSONL files. The same arguments always give the same rows.

    pack: whether several samples share a row. num_proc: processes that tokenize. cache_dir: folder of cached tokens; by
    default that of Hugging Face datasets. With several ranks, let one of them build it first. Raises UserError for bad
    files, records (with file, line and field) and settings, and if no sample is left.
    """
    if tokenize.max_length < 2:
        raise UserError(f"max_length is {tokenize.max_length}: a row needs at least 2 tokens, one of them to predict")
    if list(tokenize.aligners[-1:]) != [common_form_aligner()]:
        raise UserError("the last of `aligners` must be longspec.data.aligners.common_form_aligner")
    digests = lines.content_digests(files)
    paths = [path for path, _ in digests]
    if unread := tokenize.unread(lines.first_lines(paths)):
        logger.info(unread_note(unread))
    samples = tokenize.table(digests, num_proc, cache_dir)

    # From here on only numbers are in memory; the tokens stay in the mapped table.
    lengths = np.asarray(samples.data.column("length"))
    kept = np.flatnonzero(lengths > 0)
    if pack:
        packed = packing.pack(lengths[kept], tokenize.max_length)  # numbers only the kept samples
        rows = packing.Rows(kept[packed.samples], packed.starts)
    else:
        rows = packing.Rows(kept, np.arange(len(kept) + 1))
    _log_counts(lengths, len(rows), tokenize.max_length, lines.named(paths))
    return RowDataset(samples, rows)


def _log_counts(lengths: np.ndarray, row_count: int, max_length: int, source: str) -> None:
    """Log how many samples of `source` were used and left out. Raises UserError if none is left."""
    no_answer = int((lengths == NO_ANSWER).sum())
    no_room = int((lengths == NO_ROOM).sum())
    left_out = (
        f"left out: {no_answer} with an empty answer or text, {no_room} with a prompt of {max_length} tokens or more"
    )
    if not row_count:
        raise UserError(f"no record in {source} is usable ({left_out}); check the data and max_length")
    kept = lengths[lengths > 0]
    logger.info("%d samples of %d tokens (%s)", len(kept), kept.sum(), left_out)
    capacity = row_count * max_length
    logger.info("%d rows of %d tokens, %.1f%% filled", row_count, max_length, 100 * kept.sum() / capacity)
