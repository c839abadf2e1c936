"""The data pipeline, from JSONL files to rows of token ids."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from longspec.data import lines, packing
from longspec.data.aligners import DEFAULT_ALIGNERS, Aligner, common_form_aligner
from longspec.data.collators import Segment
from longspec.data.templates import check_chat_format, check_templates
from longspec.data.tokenization import NO_ANSWER, NO_ROOM, OVERFLOWS, Tokenize
from longspec.errors import UserError
from longspec.extras import extra

with extra("train"):
    from datasets import Dataset

logger = logging.getLogger(__name__)


class RowDataset(torch.utils.data.Dataset[list[Segment]]):
    """Rows of segments from a memory-mapped table of tokenized samples.

    Item r is a list of segments (`input_ids` int64 [T] and `prompt_length`) with at most max_length tokens in total.
    """

    def __init__(self, samples: Dataset, rows: packing.Rows, digests: Sequence[lines.FileDigest] = ()):
        """digests: the data files in order, with the digests of the bytes that were tokenized."""
        self.samples = samples.with_format("numpy", columns=["input_ids", "prompt_length"])
        self.names = samples.with_format(None, columns=["id"])
        self.rows = rows
        self.digests = digests

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
    files: lines.Files,
    tokenizer: Any,
    *,
    family: str,
    max_length: int,
    pack: bool,
    chat_format: str,
    templates: Mapping[str, str] | None = None,
    overflow: str = "truncate",
    answer_only: bool = False,
    aligners: Iterable[Aligner] = DEFAULT_ALIGNERS,
    eos_token_id: int | None = None,
    vocab_size: int | None = None,
    num_proc: int = 1,
    cache_dir: str | None = None,
) -> RowDataset:
    """Rows for the collator from JSONL files. The same arguments always give the same rows.

    files: files, folders or patterns of JSONL records.
    family: model type of the target, which selects the published chat format.
    max_length: tokens of the longest row, >= 2.
    pack: whether several samples share a row.
    chat_format: "published", "tokenizer" or "plain" (see `templates.render`).
    templates: text around a record's {prompt} by kind, instead of the built-in one.
    overflow: "split" cuts plain text and conversations of (article, abstract) pairs that are longer than max_length
        into pieces; "truncate" keeps their beginning. Other records with a prompt are always truncated.
    answer_only: whether only answers are in the loss. Records whose prompt leaves no room for an answer are then left
        out and counted in the log, and each pair is a sample of its own.
    aligners: convert records to the common form; the last one must be `common_form_aligner`.
    eos_token_id: token that ends documents and answers; by default the tokenizer's EOS.
    vocab_size: tokens that the target has embeddings for; None does not check the tokens.
    num_proc: processes that tokenize.
    cache_dir: folder of cached tokens; by default that of Hugging Face datasets. The cache depends on the content of
        the lines and on everything that turns them into tokens, and it is verified on each call. With several
        processes, let one of them build it first.

    Raises UserError for bad files, records (with file, line and field) and settings, for a file that changes while it
    is read, for a token without an embedding, and if no sample is left.
    """
    aligners = tuple(aligners)
    _check_settings(tokenizer, family, chat_format, max_length, overflow, aligners)
    checked_templates = check_templates(templates or {}, "templates")
    # The EOS of a chat template can differ from that of the tokenizer (Llama-3).
    eos = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
    if eos is None:
        raise UserError("the tokenizer has no EOS token: give eos_token_id, or a tokenizer with one")

    tokenize = Tokenize(
        tokenizer=tokenizer,
        eos_token_id=eos,
        family=family,
        chat_format=chat_format,
        max_length=max_length,
        overflow=overflow,
        answer_only=answer_only,
        aligners=aligners,
        templates=checked_templates,
        vocab_size=vocab_size,
    )

    digests = lines.content_digests(files)
    index = lines.index_lines(digests, num_proc, cache_dir)
    samples = tokenize.table(index, num_proc, cache_dir)

    # From here on only numbers are in memory; the tokens stay in the mapped table.
    lengths = np.asarray(samples.data.column("length"))
    rows = _rows(lengths, max_length, pack)
    _log_counts(len(index), lengths, len(rows), max_length)
    return RowDataset(samples, rows, digests)


def _rows(lengths: np.ndarray, max_length: int, pack: bool) -> packing.Rows:
    """The rows of all samples that are not left out."""
    kept = np.flatnonzero(lengths > 0)
    if not pack:
        return packing.Rows(kept, np.arange(len(kept) + 1))
    # `pack` numbers only the kept samples.
    packed = packing.pack(lengths[kept], max_length)
    return packing.Rows(kept[packed.samples], packed.starts)


def _log_counts(record_count: int, lengths: np.ndarray, row_count: int, max_length: int) -> None:
    """Log how many records were used and left out. Raises UserError if none is left."""
    no_answer = int((lengths == NO_ANSWER).sum())
    no_room = int((lengths == NO_ROOM).sum())
    left_out = (
        f"left out: {no_answer} with an empty answer or text, {no_room} with a prompt of {max_length} tokens or more"
    )
    if not row_count:
        raise UserError(f"none of the {record_count} records is usable ({left_out}); check the data and max_length")
    kept = lengths[lengths > 0]
    logger.info("%d records -> %d samples of %d tokens (%s)", record_count, len(kept), kept.sum(), left_out)
    capacity = row_count * max_length
    logger.info("%d rows of %d tokens, %.1f%% filled", row_count, max_length, 100 * kept.sum() / capacity)


def _check_settings(
    tokenizer: Any, family: str, chat_format: str, max_length: int, overflow: str, aligners: Sequence[Aligner]
) -> None:
    check_chat_format(family, tokenizer, chat_format)
    if max_length < 2:
        raise UserError(f"max_length is {max_length}: a row needs at least 2 tokens, one of them to predict")
    if overflow not in OVERFLOWS:
        raise UserError(f"unknown overflow '{overflow}': use one of {', '.join(OVERFLOWS)}")
    if list(aligners[-1:]) != [common_form_aligner()]:
        raise UserError("the last of `aligners` must be longspec.data.aligners.common_form_aligner")
