"""The whole way from JSONL files to rows of token ids."""

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
from longspec.data.aligners import DEFAULT_ALIGNERS, Aligner, Sample, common_form_aligner
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
TOKEN_FEATURES = Features(
    {
        "id": Value("string"),
        "input_ids": ListOf(Value("int32")),
        "prompt_length": Value("int32"),
        "length": Value("int32"),
    }
)
# `length` of samples that are left out, so that a cached table still says why.
NO_ANSWER, NO_ROOM = 0, -1
LINES_PER_BATCH = 64  # long documents: a batch is held in memory as Python integers


class RowDataset(torch.utils.data.Dataset[list[Segment]]):
    """Rows of segments over a memory-mapped table of tokenised samples.

    Item r is a list of segments: `input_ids` int64 [T] and `prompt_length`; a row has at most max_length tokens in all.
    """

    digests: Sequence[records.FileDigest]
    """The data files in order, with the digests of the bytes that were tokenized."""

    def __init__(self, samples: Dataset, rows: packing.Rows, digests: Sequence[records.FileDigest] = ()):
        self.samples = samples.with_format("numpy", columns=["input_ids", "prompt_length"])
        self.names = samples.with_format(None, columns=["id"])
        self.rows = rows
        self.digests = digests

    def __len__(self) -> int:
        return len(self.rows)

    def ids(self, row: int) -> list[str]:
        """The names of a row's samples."""
        return self.names[self.rows[row].tolist()]["id"]

    def __getitem__(self, row: int) -> list[Segment]:
        found = self.samples[self.rows[row].tolist()]
        return [
            {"input_ids": ids, "prompt_length": int(length)}
            for ids, length in zip(found["input_ids"], found["prompt_length"], strict=True)
        ]


@dataclass(frozen=True)
class Tokenise:
    """The mapped function: a batch of `records.index_lines` rows to tokenised samples (TOKEN_FEATURES)."""

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
        samples, texts = self._texts(index)
        whole = templates.encode_texts([prompt + answer for prompt, answer in texts], self.tokenizer)
        prompts = iter(templates.encode_texts([prompt for prompt, _ in texts if prompt], self.tokenizer))
        columns: dict[str, list] = {name: [] for name in TOKEN_FEATURES}
        for sample, (prompt, answer), ids in zip(samples, texts, whole, strict=True):
            prompt_length = _common_prefix(next(prompts), ids) if prompt else 0
            if not answer.strip():
                pieces = [_piece([], 0, NO_ANSWER)]
            else:
                pieces = self._pieces(ids, prompt_length, splits=not prompt or self._is_pairs(sample))
            for piece in pieces:
                for name, value in {"id": sample["id"], **piece}.items():
                    columns[name].append(value)
        return columns

    def table(self, index: Dataset, num_proc: int, cache_dir: str | None) -> Dataset:
        """The samples of all lines of `index`, memory-mapped, by at most `num_proc` processes, or from the cache."""
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
        """Changes with what the lines hold, each setting and the code that makes the tokens (others' aligners, too)."""
        lines = np.asarray(index.data.column("digest")).tobytes()
        modules = [records, templates, aligner_functions, inspect.getmodule(Tokenise)]
        modules += [inspect.getmodule(getattr(aligner, "func", aligner)) for aligner in self.aligners]
        sources = [inspect.getsource(module) for module in modules if module and hasattr(module, "__file__")]
        settings = {name: value for name, value in vars(self).items() if name != "tokenizer"}
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        tokenizer: Any = self.tokenizer
        if backend:  # what it does, not where it lies
            tokenizer = backend.to_str(), tokenizer.chat_template, str(tokenizer.special_tokens_map)
        return Hasher.hash([lines, sources, settings, tokenizer])

    def _texts(self, index: dict[str, list]) -> tuple[list[Sample], list[tuple[str, str]]]:
        samples: list[Sample] = []
        texts: list[tuple[str, str]] = []
        for path, line, raw in records.read_lines(index):
            record = records.parse_record(path, line, raw)
            with records.located(path, line):
                aligned = _aligned(record, self.aligners[:-1])
                # Of a conversation only the last answer is in the loss then.
                for part in records.split_pairs(aligned) if self.answer_only else [aligned]:
                    sample: Any = self.aligners[-1](part)
                    samples.append(sample)
                    texts.append(
                        templates.render(sample, self.family, self.tokenizer, self.chat_format, self.templates)
                    )
        return samples, texts

    def _is_pairs(self, sample: Sample) -> bool:
        """Whether it is a conversation of (article, abstract) pairs, all of whose tokens are in the loss."""
        return sample["kind"] == "article" and isinstance(sample["prompt"], list)

    def _pieces(self, ids: list[int], prompt_length: int, splits: bool) -> list[dict[str, Any]]:
        """One sample cut to max_length: all pieces of one that may be split if `overflow` says so, else its beginning.

        Pieces have no prompt: samples that may be split have all tokens in the loss.
        """
        if ids[-1:] != [self.eos_token_id]:
            ids = [*ids, self.eos_token_id]
        if self.answer_only and prompt_length >= self.max_length:
            return [_piece([], 0, NO_ROOM)]
        if not splits or self.overflow == "truncate":
            kept = ids[: self.max_length]
            return [_piece(kept, min(prompt_length, len(kept)), len(kept))]
        cut = [ids[start : start + self.max_length] for start in range(0, len(ids), self.max_length)]
        return [_piece(piece, 0, len(piece)) for piece in cut if len(piece) > 1]  # one token alone predicts nothing


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
    """Rows for the collators from JSONL files; the same arguments always give the same rows.

    max_length: tokens of the longest row. chat_format: "published", "tokenizer" or "plain" (see `templates.render`).
    templates: kind -> text around a record's {prompt}, in place of the built-in one. overflow: plain text that is
    longer than max_length, and a conversation of (article, abstract) pairs, is split into pieces ("split") or cut
    ("truncate"); other records with a prompt are cut. answer_only: records whose prompt leaves no room for an answer
    are left out and counted in the log, and each pair is a sample of its own. pack: several samples share a row.
    eos_token_id: ends documents and answers (default: the tokenizer's). cache_dir: where tokens are cached (default:
    the folder of Hugging Face datasets), by the lines' contents and everything that turns them into tokens; the cache
    is verified on each call, and one of several processes should build it first.

    Raises UserError for bad files, records (naming file, line and field) and settings, if a file changes while it is
    read, and if no sample is left.
    """
    aligners = tuple(aligners)
    _check(tokenizer, family, chat_format, max_length, overflow, aligners)
    texts = check_templates(templates or {}, "templates")
    eos = tokenizer.eos_token_id if eos_token_id is None else eos_token_id
    if eos is None:
        raise UserError("the tokenizer has no EOS token: give eos_token_id, or a tokenizer with one")
    tokenise = Tokenise(tokenizer, eos, family, chat_format, max_length, overflow, answer_only, aligners, texts)
    digests = records.content_digests(files)
    index = records.index_lines(digests, num_proc, cache_dir)
    samples = tokenise.table(index, num_proc, cache_dir)
    lengths = np.asarray(samples.data.column("length"))
    rows = _rows(lengths, max_length, pack)
    _report(len(index), lengths, len(rows), max_length)
    return RowDataset(samples, rows, digests)


def _aligned(record: records.Record, aligners: Sequence[Aligner]) -> records.Record:
    """`record` through each of `aligners`. What one of them stumbles over becomes a UserError that says where."""
    place = record[records.WHERE]
    for aligner in aligners:
        try:
            record = aligner(record)
        except UserError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError) as error:
            name = getattr(getattr(aligner, "func", aligner), "__qualname__", type(aligner).__name__)
            reason = f"{type(error).__name__}: {first_line(error)}"
            raise UserError(f"{place}: the aligner {name} cannot take this record ({reason})") from error
    return record


def _rows(lengths: np.ndarray, max_length: int, pack: bool) -> packing.Rows:
    kept = np.flatnonzero(lengths > 0)
    if not pack:
        return packing.Rows(kept, np.arange(len(kept) + 1))
    packed = packing.pack(lengths[kept], max_length)
    return packing.Rows(kept[packed.samples], packed.starts)


def _report(records_read: int, lengths: np.ndarray, rows: int, max_length: int) -> None:
    no_answer, no_room = int((lengths == NO_ANSWER).sum()), int((lengths == NO_ROOM).sum())
    left_out = (
        f"left out: {no_answer} with an empty answer or text, {no_room} with a prompt of {max_length} tokens or more"
    )
    if not rows:
        raise UserError(
            f"none of the {records_read} records can be trained on ({left_out}); check the data and max_length"
        )
    real = lengths[lengths > 0]
    logger.info(
        "%d records -> %d samples of %d tokens (%s) -> %d rows, %.1f%% of %d tokens filled",
        *(records_read, len(real), real.sum(), left_out, rows, 100 * real.sum() / (rows * max_length), max_length),
    )


def _check(
    tokenizer: Any, family: str, chat_format: str, max_length: int, overflow: str, aligners: Sequence[Aligner]
) -> None:
    templates.check_chat_format(family, tokenizer, chat_format)
    if max_length < 2:
        raise UserError(f"max_length is {max_length}: a row needs at least 2 tokens to learn one")
    if overflow not in OVERFLOWS:
        raise UserError(f"unknown overflow '{overflow}': use one of {', '.join(OVERFLOWS)}")
    if list(aligners[-1:]) != [common_form_aligner()]:
        raise UserError("the last of `aligners` must be longspec.data.aligners.common_form_aligner")


def _piece(ids: list[int], prompt_length: int, length: int) -> dict[str, Any]:
    return {"input_ids": np.array(ids, dtype=np.int32), "prompt_length": prompt_length, "length": length}


def _common_prefix(prompt: Sequence[int], whole: Sequence[int]) -> int:
    """How many tokens of the prompt alone `whole` starts with: a token that joins prompt and answer is no prompt."""
    shared = min(len(prompt), len(whole))
    return next((i for i in range(shared) if prompt[i] != whole[i]), shared)
