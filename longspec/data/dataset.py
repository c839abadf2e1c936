"""The data pipeline, from JSONL files to rows of token ids."""

import inspect
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longspec.data import aligners as aligner_functions
from longspec.data import packing, records, templates
from longspec.data.aligners import DEFAULT_ALIGNERS, AlignedRecord, Aligner, common_form_aligner
from longspec.data.cache import cache_folder, cached_table
from longspec.data.collators import Segment
from longspec.data.templates import check_templates
from longspec.errors import UserError, first_line
from longspec.extras import extra

with extra("train"):
    from datasets import Dataset, Features, Value
    from datasets import Sequence as ListOf
    from datasets.fingerprint import Hasher

logger = logging.getLogger(__name__)

OVERFLOWS = ("split", "truncate")
"""Treatments of samples that are longer than a row."""
TOKEN_FEATURES = Features(
    {
        "id": Value("string"),
        "input_ids": ListOf(Value("int32")),
        "prompt_length": Value("int32"),
        "length": Value("int32"),
    }
)
"""Columns of the table of tokenized samples."""
NO_ANSWER = 0
"""`length` of a record that is left out because its answer or text is empty."""
NO_ROOM = -1
"""`length` of a record that is left out because its prompt fills the whole row."""
LINES_PER_BATCH = 64
"""Lines that are tokenized together. Long documents are held in memory as Python integers."""


class RowDataset(torch.utils.data.Dataset[list[Segment]]):
    """Rows of segments from a memory-mapped table of tokenized samples.

    Item r is a list of segments (`input_ids` int64 [T] and `prompt_length`) with at most max_length tokens in total.
    """

    def __init__(self, samples: Dataset, rows: packing.Rows, digests: Sequence[records.FileDigest] = ()):
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


@dataclass(frozen=True)
class Tokenize:
    """A function from a batch of `records.index_lines` rows to tokenized samples (TOKEN_FEATURES).

    See `build_dataset` for the attributes.
    """

    tokenizer: Any
    eos_token_id: int
    family: str
    chat_format: str
    max_length: int
    overflow: str
    answer_only: bool
    aligners: tuple[Aligner, ...]
    templates: Mapping[str, str] = field(default_factory=dict)

    def __call__(self, index: dict[str, list]) -> dict[str, list]:
        aligned, texts = self._texts(index)
        # Encoded as one text, as the target reads it, and the prompt again by itself to find where it ends.
        whole = templates.encode_texts([prompt + answer for prompt, answer in texts], self.tokenizer)
        prompts = iter(templates.encode_texts([prompt for prompt, _ in texts if prompt], self.tokenizer))

        columns: dict[str, list] = {name: [] for name in TOKEN_FEATURES}
        for record, (prompt, answer), ids in zip(aligned, texts, whole, strict=True):
            prompt_length = _common_prefix(next(prompts), ids) if prompt else 0
            if answer.strip():
                splits = not prompt or self._is_pairs(record)
                pieces = self._pieces(ids, prompt_length, splits)
            else:
                pieces = [_piece([], 0, NO_ANSWER)]
            for piece in pieces:
                for name, value in {"id": record["id"], **piece}.items():
                    columns[name].append(value)
        return columns

    def table(self, index: Dataset, num_proc: int, cache_dir: str | None) -> Dataset:
        """The samples of all lines of `index`, memory-mapped. At most `num_proc` processes tokenize them if needed."""
        fingerprint = self.fingerprint(index)
        workers = min(num_proc, -(-len(index) // LINES_PER_BATCH))

        def build(folder: str) -> None:
            index.map(
                self,
                batched=True,
                batch_size=LINES_PER_BATCH,
                remove_columns=index.column_names,
                features=TOKEN_FEATURES,
                num_proc=workers if workers > 1 else None,
                new_fingerprint=fingerprint,
                cache_file_name=str(Path(folder) / "tokens.arrow"),
                desc="Tokenizing",
            )

        return cached_table(cache_folder(cache_dir) / f"tokens-{fingerprint}", build)

    def fingerprint(self, index: Dataset) -> str:
        """A hash of everything that determines the tokens: lines, settings, tokenizer and code, aligners included."""
        # Lines with the same digests have the same path, number and bytes.
        lines = np.asarray(index.data.column("digest")).tobytes()
        modules = [records, templates, aligner_functions, inspect.getmodule(Tokenize)]
        modules += [inspect.getmodule(getattr(aligner, "func", aligner)) for aligner in self.aligners]
        sources = [inspect.getsource(module) for module in modules if module and hasattr(module, "__file__")]
        settings = {name: value for name, value in vars(self).items() if name != "tokenizer"}
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        tokenizer: Any = self.tokenizer
        # Hash what the tokenizer does. A pickle of it would depend on its path.
        if backend:
            tokenizer = backend.to_str(), tokenizer.chat_template, str(tokenizer.special_tokens_map)
        return Hasher.hash([lines, sources, settings, tokenizer])

    def _texts(self, index: dict[str, list]) -> tuple[list[AlignedRecord], list[tuple[str, str]]]:
        """The aligned records of some lines, and the prompt and answer text of each."""
        aligned_records: list[AlignedRecord] = []
        texts: list[tuple[str, str]] = []
        for path, line, raw in records.read_lines(index):
            record = records.parse_record(path, line, raw)
            with records.located(path, line):
                record = _apply_aligners(record, self.aligners[:-1])
                # A conversation has only its last answer in the loss, so pairs become samples of their own.
                parts = records.split_pairs(record) if self.answer_only else [record]
                for part in parts:
                    aligned: Any = self.aligners[-1](part)
                    aligned_records.append(aligned)
                    texts.append(
                        templates.render(aligned, self.family, self.tokenizer, self.chat_format, self.templates)
                    )
        return aligned_records, texts

    def _is_pairs(self, record: AlignedRecord) -> bool:
        """Whether a record is a conversation of (article, abstract) pairs with all tokens in the loss."""
        return record["kind"] == "article" and isinstance(record["prompt"], list)

    def _pieces(self, ids: list[int], prompt_length: int, splits: bool) -> list[dict[str, Any]]:
        """One sample cut to max_length: its beginning, or all pieces if it may be split and `overflow` is "split".

        Pieces have no prompt, because samples that may be split have all tokens in the loss.
        """
        if ids[-1:] != [self.eos_token_id]:
            ids = [*ids, self.eos_token_id]
        if self.answer_only and prompt_length >= self.max_length:
            return [_piece([], 0, NO_ROOM)]
        if not splits or self.overflow == "truncate":
            kept = ids[: self.max_length]
            return [_piece(kept, min(prompt_length, len(kept)), len(kept))]
        pieces = [ids[start : start + self.max_length] for start in range(0, len(ids), self.max_length)]
        # A single token has nothing to predict.
        return [_piece(piece, 0, len(piece)) for piece in pieces if len(piece) > 1]


def build_dataset(
    files: records.Files,
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
    num_proc: processes that tokenize.
    cache_dir: folder of cached tokens; by default that of Hugging Face datasets. The cache depends on the content of
        the lines and on everything that turns them into tokens, and it is verified on each call. With several
        processes, let one of them build it first.

    Raises UserError for bad files, records (with file, line and field) and settings, for a file that changes while it
    is read, and if no sample is left.
    """
    aligners = tuple(aligners)
    _check_settings(tokenizer, family, chat_format, max_length, overflow, aligners)
    checked_templates = check_templates(templates or {}, "templates")
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
    )

    digests = records.content_digests(files)
    index = records.index_lines(digests, num_proc, cache_dir)
    samples = tokenize.table(index, num_proc, cache_dir)
    lengths = np.asarray(samples.data.column("length"))
    rows = _rows(lengths, max_length, pack)
    _log_counts(len(index), lengths, len(rows), max_length)
    return RowDataset(samples, rows, digests)


def _apply_aligners(record: records.Record, aligners: Sequence[Aligner]) -> records.Record:
    """`record` after each of `aligners`. An error in one becomes a UserError that names the record."""
    origin = record[records.WHERE]
    for aligner in aligners:
        try:
            record = aligner(record)
        except UserError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            name = getattr(getattr(aligner, "func", aligner), "__qualname__", type(aligner).__name__)
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(f"{origin}: the aligner {name} failed on this record ({reason})") from error
    return record


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
    templates.check_chat_format(family, tokenizer, chat_format)
    if max_length < 2:
        raise UserError(f"max_length is {max_length}: a row needs at least 2 tokens, one of them to predict")
    if overflow not in OVERFLOWS:
        raise UserError(f"unknown overflow '{overflow}': use one of {', '.join(OVERFLOWS)}")
    if list(aligners[-1:]) != [common_form_aligner()]:
        raise UserError("the last of `aligners` must be longspec.data.aligners.common_form_aligner")


def _piece(ids: list[int], prompt_length: int, length: int) -> dict[str, Any]:
    return {"input_ids": np.array(ids, dtype=np.int32), "prompt_length": prompt_length, "length": length}


def _common_prefix(prompt: Sequence[int], whole: Sequence[int]) -> int:
    """The number of leading tokens that the prompt alone shares with `whole`.

    The tokenizer may merge the end of the prompt with the start of the answer. Such a token belongs to the answer.
    """
    shared = min(len(prompt), len(whole))
    return next((i for i in range(shared) if prompt[i] != whole[i]), shared)
