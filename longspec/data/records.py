"""From JSONL files to records: the lines of each file, their content digests, and each record's kind."""

from __future__ import annotations

import glob
import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from longspec.digests import content_hash, file_digests
from longspec.errors import UserError
from longspec.extras import extra

if TYPE_CHECKING:
    from datasets import Dataset

Record = dict[str, Any]
Files = str | Path | Iterable[str | Path]

SUFFIXES = (".jsonl", ".json")
VERSION = 1  # of the table of lines: raised when its columns change
WHERE = "_where"  # the key under which a record carries "file:line"
LINE_COLUMNS = {"file": "string", "line": "int64", "start": "int64", "digest": "int64"}


class RecordError(UserError):
    """What is wrong with one record, as (field, problem); `located` adds the file and the line."""

    def __str__(self) -> str:
        field, problem = self.args
        return f"field '{field}' {problem}"


class Kind(NamedTuple):
    """A kind of record: the field of its prompt (None = plain text) and the field of its answer."""

    name: str
    prompt_field: str | None
    answer_field: str


TURN_KINDS = ("messages", "conversation", "conversations")
# The first kind whose fields are all present counts. Alpaca's own records repeat prompt and answer as `text`.
KINDS = (
    Kind("instruction", "instruction", "output"),
    Kind("text", None, "text"),
    Kind("source", "source", "target"),
    Kind("text", None, "target"),
    *(Kind(name, None, name) for name in TURN_KINDS),
    Kind("article", "article", "abstract"),
    Kind("report", "report", "summary"),
    Kind("document", "document", "summary"),
    Kind("transcript", "transcript", "summary"),
    Kind("prefix", "prefix", "suffix"),
    Kind("problem", "problem", "qwq"),
    Kind("problem", "problem", "solution"),
    Kind("prompt", "prompt", "completion"),
)
# What published records carry in `source` to say where they come from; such a word is no prompt.
SOURCE_TAGS = ("code", "book", "arxiv", "tulu-v2", "gov-report", "multi-news", "meetingbank")


def data_files(files: Files) -> list[str]:
    """The data files named by `files`: a file, a folder (searched in depth), a glob pattern, or several of these.

    Raises UserError for a name behind which there is nothing.
    """
    names = [files] if isinstance(files, str | Path) else list(files)
    if not names:
        raise UserError("no data files given: name at least one .jsonl file, folder or pattern")
    found: list[str] = []
    for name in map(str, names):
        if os.path.isfile(name):
            matches = [name]
        elif os.path.isdir(name):
            inside = sorted(Path(name).rglob("*"))
            matches = [str(path) for path in inside if path.suffix in SUFFIXES and path.is_file()]
        else:
            matches = sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))
        if not matches:
            raise UserError(f"no data file at '{name}': give a .jsonl file, a folder of them, or a pattern")
        found += matches
    for path in found:
        if not os.access(path, os.R_OK):
            raise UserError(f"data file '{path}' cannot be read: check its permissions")
    return found


class FileDigest(NamedTuple):
    """One data file and the digest of its content."""

    path: str
    """Absolute path, symbolic links not resolved."""
    digest: str
    """BLAKE2b of the file's bytes, 128 bits as 32 hex digits."""


def content_digests(files: Files) -> list[FileDigest]:
    """The digest of each data file's bytes, in the order of `data_files(files)`.

    Every byte is read; neither size nor modification time is trusted. Two lists hold the same data if their `digest`s
    are equal in order, whatever the paths. Raises UserError for a missing or unreadable file.
    """
    paths = [os.path.abspath(path) for path in data_files(files)]
    return list(map(FileDigest, paths, file_digests(paths)))


def index_lines(digests: Sequence[FileDigest], num_proc: int = 1, cache_dir: str | None = None) -> Dataset:
    """A memory-mapped table of all non-blank lines of the files that `content_digests` returned.

    Columns: `file`, `line` (from 1), `start` (byte offset) and `digest`, 64 bits over path, line number and the line's
    bytes. Lines end at b"\\n" only, because a JSON string may contain U+2028, U+0085 and the like. The table is cached
    by the files' paths and content digests. Raises UserError if no line is found, a file has changed since it was
    digested, or the package datasets is missing.
    """
    with extra("train"):
        from datasets import Dataset, Features, Value
        from datasets.exceptions import DatasetGenerationError

    from longspec.data.cache import cache_folder, cached_table

    if not any(True for _ in _lines([FileDigest(one.path, "") for one in digests])):
        names = ", ".join(one.path for one in digests[:3])
        raise UserError(f"no record in {names}{' …' if len(digests) > 3 else ''}: all lines are blank")
    workers = min(num_proc, len(digests))

    def build(folder: str) -> None:
        try:
            Dataset.from_generator(
                _lines,
                features=Features({name: Value(dtype) for name, dtype in LINE_COLUMNS.items()}),
                cache_dir=folder,
                gen_kwargs={"files": list(digests)},
                num_proc=workers if workers > 1 else None,
            )
        except DatasetGenerationError as error:
            if isinstance(error.__cause__, UserError):
                raise error.__cause__ from error
            raise

    name = content_hash(json.dumps([VERSION, digests]).encode()).hexdigest()
    return cached_table(cache_folder(cache_dir) / f"lines-{name}", build)


def _lines(files: list[FileDigest]) -> Iterator[Record]:
    """The lines of `files`; UserError at a file's end if its bytes are not those of its digest ("": not compared)."""
    for path, expected in files:
        whole = content_hash()
        with open(path, "rb") as handle:
            start = 0
            for number, raw in enumerate(handle, 1):
                whole.update(raw)
                if raw.strip():
                    yield {"file": path, "line": number, "start": start, "digest": _line_digest(path, number, raw)}
                start += len(raw)
        if expected and whole.hexdigest() != expected:
            raise _changed(path)


def _line_digest(path: str, number: int, raw: bytes) -> int:
    digest = hashlib.blake2b(f"{path}\0{number}\0".encode(errors="surrogateescape"), digest_size=8)
    digest.update(raw)
    return int.from_bytes(digest.digest(), "little", signed=True)


def _changed(path: str) -> UserError:
    return UserError(f"data file '{path}' changed while it was read; start again once nothing writes to it")


def read_lines(index: dict[str, list]) -> Iterator[tuple[str, int, bytes]]:
    """(file, line number, bytes) of a batch of `index_lines` rows; a file stays open while its lines follow.

    Raises UserError for a line whose bytes are no longer those that were indexed.
    """
    handle = None
    columns = (index[name] for name in ("file", "line", "start", "digest"))
    try:
        for path, number, start, digest in zip(*columns, strict=True):
            if handle is None or handle.name != path:
                if handle is not None:
                    handle.close()
                handle = open(path, "rb")  # noqa: SIM115 (closed below, kept over several rows)
            handle.seek(start)
            raw = handle.readline()
            if _line_digest(path, number, raw) != digest:
                raise _changed(path)
            yield path, number, raw
    finally:
        if handle is not None:
            handle.close()


@contextmanager
def located(path: str, line: int) -> Iterator[None]:
    """Turn a RecordError of the block into a UserError that names file, line and field."""
    try:
        yield
    except RecordError as error:
        raise UserError(f"{path}, line {line}: {error}") from error


def parse_record(path: str, line: int, raw: bytes) -> Record:
    """The JSON object on one line, plus where it stands. Raises UserError if the line is anything else."""
    if line == 1:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        record = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:  # JSONDecodeError and UnicodeDecodeError are ValueErrors
        raise UserError(f"{path}, line {line}: not a JSON line ({error}); put one JSON object on each line") from error
    if not isinstance(record, dict):
        raise UserError(f"{path}, line {line}: a {type(record).__name__} where a JSON object with named fields must be")
    return {**record, WHERE: f"{path}:{line}"}


def is_list_of_pairs(record: Record) -> bool:
    """Whether the record is of the kind article and holds several (article, abstract) pairs, as two lists."""
    lists = isinstance(record.get("article"), list) or isinstance(record.get("abstract"), list)
    return lists and record_kind(record).name == "article"


def split_pairs(record: Record) -> list[Record]:
    """One record per pair where `is_list_of_pairs`, else the record itself.

    Two empty lists are one pair of empty texts. The pair's number is appended to its id (if there is one) and to WHERE.
    Raises RecordError for lists of different lengths, or a list next to a string.
    """
    if not is_list_of_pairs(record):
        return [record]
    article, abstract = record["article"], record["abstract"]
    if not isinstance(article, list) or not isinstance(abstract, list):
        lone = "abstract" if isinstance(article, list) else "article"
        raise RecordError(lone, f"must be a list, as its partner is, not {_type_name(record[lone])}")
    if len(article) != len(abstract):
        raise RecordError("abstract", f"has {len(abstract)} items where 'article' has {len(article)}")
    pairs = list(zip(article, abstract, strict=True)) or [("", "")]
    names = [name for name in ("id", WHERE) if name in record]
    return [
        {**record, "article": one, "abstract": other, **{name: f"{record[name]}#{number}" for name in names}}
        for number, (one, other) in enumerate(pairs)
    ]


def record_kind(record: Record) -> Kind:
    """The record's kind as its fields tell it; a null field counts as absent. Raises RecordError if there is none."""
    present = {name for name, value in record.items() if value is not None}
    if record.get("source") in ("", *SOURCE_TAGS):
        present.discard("source")
    for kind in KINDS:
        if kind.answer_field in present and (kind.prompt_field is None or kind.prompt_field in present):
            return kind
    for kind in KINDS:
        if kind.prompt_field in present:
            answers = [other.answer_field for other in KINDS if other.prompt_field == kind.prompt_field]
            raise RecordError("' or '".join(answers), f"is missing or null, and '{kind.prompt_field}' needs it")
    known = dict.fromkeys(
        f"{kind.prompt_field} + {kind.answer_field}" if kind.prompt_field else kind.answer_field for kind in KINDS
    )
    names = ", ".join(sorted(set(record) - {WHERE})) or "none"
    raise RecordError("text", f"is missing or null; this record has {names}; wanted is one of: {', '.join(known)}")


def text_of(value: Any, field: str) -> str:
    """`value`, which must be a string that has a UTF-8 form. Raises RecordError otherwise."""
    if not isinstance(value, str):
        raise RecordError(field, f"must be a string, not {_type_name(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RecordError(field, "holds half of a surrogate pair (\\ud800 … \\udfff), which is no text") from None
    return value


def _type_name(value: Any) -> str:
    return "null" if value is None else type(value).__name__
