"""Tokenization of records: from lines of JSONL to samples of token ids, in a table that is cached on disk."""

import inspect
import os
import signal
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from longspec.data import lines, record_fields, records, templates
from longspec.data.aligners import DEFAULT_ALIGNERS, AlignedRecord, Aligner
from longspec.data.cache import cached_table
from longspec.digests import file_digests
from longspec.extras import extra
from longspec.signals import end_with_parent

with extra("train"):
    import pyarrow as pa
    from datasets import Dataset, Features, Value, config
    from datasets import Sequence as ListOf
    from datasets.fingerprint import Hasher

Digests = Sequence[Sequence[str]]
"""Path and digest of each file."""

TOKEN_FEATURES = Features(
    {
        "id": Value("string"),
        "input_ids": ListOf(Value("int32")),
        "prompt_length": Value("int32"),
        # > 0, or the reason why the record is left out: NO_ANSWER, NO_ROOM.
        "length": Value("int32"),
    }
)
NO_ANSWER = 0
"""`length` of a record that is left out because its answer or text is empty."""
NO_ROOM = -1
"""`length` of a record that is left out because its prompt fills the whole row."""


@dataclass(frozen=True)
class Tokenize:
    """A function from one of `lines.chunks` to tokenized samples (TOKEN_FEATURES)."""

    tokenizer: Any
    eos_token_id: int
    """Token that ends documents and answers. That of a chat template can differ from the tokenizer's (Llama-3)."""
    vocab_size: int
    """Number of tokens that the target has embeddings for."""
    family: str
    """Model type of the target, which selects the published chat format."""
    chat_format: str
    """"published", "tokenizer" or "plain" (see `templates.render`)."""
    max_length: int
    """Tokens of the longest row, >= 2."""
    overflow: str = "truncate"
    """"split" cuts plain text and conversations of (article, abstract) pairs that are longer than max_length into
    pieces; "truncate" keeps their beginning. Other records with a prompt are always truncated."""
    answer_only: bool = False
    """Whether only answers are in the loss. Records whose prompt leaves no room for an answer are then left out and
    counted in the log, and each pair is a sample of its own."""
    aligners: tuple[Aligner, ...] = DEFAULT_ALIGNERS
    """Convert records to the common form; the last one must be `common_form_aligner`."""
    templates: Mapping[str, str] = field(default_factory=dict)
    """Text around a record's {prompt} by kind, instead of the built-in one."""

    def __call__(self, chunk: Mapping[str, Any]) -> pa.RecordBatch:
        """The samples of one of `lines.chunks`."""
        samples = list(self._texts(lines.read_chunk(**chunk)))
        # The prompt again by itself, to find where it ends.
        encoded = templates.encode_pairs([text for _, text, _ in samples], self.tokenizer)
        columns: dict[str, list] = {name: [] for name in TOKEN_FEATURES}
        for (record, (prompt, answer), place), ids, prompt_ids in zip(samples, *encoded, strict=True):
            templates.check_embedded(ids, self.vocab_size, self.tokenizer, place)
            prompt_length = _common_prefix(prompt_ids, ids) if prompt else 0
            if answer.strip():
                # A conversation of (article, abstract) pairs has all tokens in the loss, as plain text has.
                splits = not prompt or (record["kind"] == "article" and isinstance(record["prompt"], list))
                pieces = self._pieces(ids, prompt_length, splits, record.get("cut", False))
            else:
                pieces = [_piece([], 0, NO_ANSWER)]
            # One record can become several samples, all with its id.
            for piece in pieces:
                for name, value in {"id": record["id"], **piece}.items():
                    columns[name].append(value)
        return pa.RecordBatch.from_pydict(columns, schema=TOKEN_FEATURES.arrow_schema)

    def table(self, digests: Digests, num_proc: int, cache_dir: str | None) -> Dataset:
        """The samples of all lines of the files, memory-mapped. Up to `num_proc` processes tokenize them if needed."""

        def build(folder: str) -> None:
            # Only numbers; the lines stay in the files.
            chunks = list(lines.chunks(path for path, _ in digests))
            with (
                pa.OSFile(f"{folder}/tokens.arrow", "wb") as file,
                pa.ipc.new_stream(file, TOKEN_FEATURES.arrow_schema) as table,
            ):
                batches = self._tokenized(chunks, min(num_proc, len(chunks)))
                for batch in tqdm(batches, desc="Tokenizing", unit=" chunks", total=len(chunks)):
                    table.write_batch(batch)
            lines.check_unchanged(digests)

        folder = Path(cache_dir or config.HF_DATASETS_CACHE) / "longspec" / f"tokens-{self.fingerprint(digests)}"
        return cached_table(folder, build)

    def _tokenized(self, chunks: list[dict[str, Any]], workers: int) -> Iterator[pa.RecordBatch]:
        """The samples of each chunk, in order. Processes take the next chunk when they have finished one."""
        if workers < 2:
            yield from map(self, chunks)
            return
        with ProcessPoolExecutor(workers, initializer=_start_worker, initargs=(self,)) as pool:
            yield from pool.map(_tokenize, chunks)

    def unread(self, first_lines: Iterable[lines.Line]) -> set[str]:
        """The names of the fields of these lines that nothing reads. Raises UserError."""
        names: set[str] = set()
        for path, line, raw in first_lines:
            with records.located(path, line):
                names |= record_fields.unread_fields(self._prepared(records.parse_record(path, line, raw)))
        return names

    def fingerprint(self, digests: Digests) -> str:
        """A hash of everything that determines the tokens: files, settings, tokenizer and code, aligners included."""
        # A change to this code may change the tokens, so its source is hashed, not a version number.
        functions = [inspect.getmodule(getattr(aligner, "func", aligner)) for aligner in self.aligners]
        own = {file for module in functions if (file := getattr(module, "__file__", None)) is not None}
        sources = file_digests([*sorted(Path(__file__).parent.glob("*.py")), *sorted(own)])
        settings = {name: value for name, value in vars(self).items() if name != "tokenizer"}
        backend = getattr(self.tokenizer, "backend_tokenizer", None)
        tokenizer: Any = self.tokenizer
        # Hash what the tokenizer does. A pickle of it would depend on its path.
        if backend:
            tokenizer = backend.to_str(), tokenizer.chat_template, str(tokenizer.special_tokens_map)
        return Hasher.hash([digests, sources, settings, tokenizer])

    def _texts(self, chunk: Iterable[lines.Line]) -> Iterator[tuple[AlignedRecord, tuple[str, str], str]]:
        """The aligned records of some lines, the prompt and answer text of each, and its file and line."""
        for path, line, raw in chunk:
            with records.located(path, line):
                record = self._prepared(records.parse_record(path, line, raw))
                # A conversation has only its last answer in the loss, so pairs become samples of their own.
                parts = records.split_pairs(record) if self.answer_only else [record]
                for part in parts:
                    aligned: Any = self.aligners[-1](part)
                    text = templates.render(aligned, self.family, self.tokenizer, self.chat_format, self.templates)
                    yield aligned, text, f"{path}, line {line}"

    def _prepared(self, record: records.Record) -> records.Record:
        """`record` after all aligners but the last, which runs after lists of pairs are split."""
        return reduce(lambda aligned, aligner: aligner(aligned), self.aligners[:-1], record)

    def _pieces(self, ids: list[int], prompt_length: int, splits: bool, is_cut: bool) -> list[dict[str, Any]]:
        """One sample cut to max_length: its beginning, or all pieces if it may be split and `overflow` is "split"."""
        # The draft must learn to propose the EOS, but not where an answer was cut. A template may have written it.
        if not is_cut and ids[-1:] != [self.eos_token_id]:
            ids = [*ids, self.eos_token_id]
        # A truncated prompt without an answer would add no token to the loss.
        if self.answer_only and prompt_length >= self.max_length:
            return [_piece([], 0, NO_ROOM)]
        # Nothing in the sample predicts its first token, and some texts have no other.
        if len(ids) <= max(1, prompt_length if self.answer_only else 1):
            return [_piece([], 0, NO_ANSWER)]
        if not splits or self.overflow == "truncate":
            kept = ids[: self.max_length]
            return [_piece(kept, min(prompt_length, len(kept)), len(kept))]
        # Samples that may be split have all tokens in the loss, so the pieces have no prompt.
        pieces = [ids[start : start + self.max_length] for start in range(0, len(ids), self.max_length)]
        return [_piece(piece, 0, len(piece)) for piece in pieces if len(piece) > 1]


_worker: Tokenize | None = None
"""What a process of the pool runs. Forked ones inherit it: to pickle a tokenizer of 150,000 tokens takes seconds."""


def _start_worker(tokenize: Tokenize) -> None:
    global _worker
    _worker = tokenize
    # The threads of the tokenizer do not survive a fork: a process that waited for them would never end.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    # It holds the queue of chunks open itself, so it would wait for a killed parent, too.
    end_with_parent(by=signal.SIGKILL)


def _tokenize(chunk: dict[str, Any]) -> pa.RecordBatch:
    assert _worker is not None
    return _worker(chunk)


def _piece(ids: list[int], prompt_length: int, length: int) -> dict[str, Any]:
    return {"input_ids": np.array(ids, dtype=np.int32), "prompt_length": prompt_length, "length": length}


def _common_prefix(prompt: Sequence[int], whole: Sequence[int]) -> int:
    """The number of leading tokens that the prompt alone shares with `whole`."""
    # The tokenizer may merge the end of the prompt with the start of the answer. Such a token belongs to the answer.
    shared = min(len(prompt), len(whole))
    return next((i for i in range(shared) if prompt[i] != whole[i]), shared)
