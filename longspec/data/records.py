"""Records of JSONL files: their lines, content digests and kinds."""

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
"""One or more files, folders or glob patterns."""

SUFFIXES = (".jsonl", ".json")
"""Suffixes of the data files in a folder."""
VERSION = 1
"""Version of the cached table of lines. Increase it when the columns change."""
WHERE = "_where"
"""Key of a record's origin, "file:line"."""
LINE_COLUMNS = {"file": "string", "line": "int64", "start": "int64", "digest": "int64"}
"""Columns of the table of lines (see `index_lines`)."""


class RecordError(UserError):
    """A problem of one record, as (field, problem). `located` adds the file and the line."""

    def __str__(self) -> str:
        field, problem = self.args
        return f"field '{field}' {problem}"


class Kind(NamedTuple):
    """A kind of record, recognized by its fields."""

    name: str
    prompt_field: str | None
    """Field of the prompt; None for plain text and conversations."""
    answer_field: str


TURN_KINDS = ("messages", "conversation", "conversations")
"""Kinds whose only field is a list of turns."""
# A record has the first kind whose fields are all present. Alpaca comes before plain text, because its records repeat
# prompt and answer as `text`.
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
SOURCE_TAGS = ("code", "book", "arxiv", "tulu-v2", "gov-report", "multi-news", "meetingbank")
"""Values of `source` in published records that name a corpus and are not prompts."""


def data_files(files: Files) -> list[str]:
    """The data files that `files` names: a file, a folder (searched recursively), a glob pattern, or a list of these.

    Raises UserError for a name that matches no file and for a file that cannot be read.
    """
    names = [files] if isinstance(files, str | Path) else list(files)
    if not names:
        raise UserError("no data files given: name at least one .jsonl file, folder or pattern")
    paths: list[str] = []
    for name in map(str, names):
        matches = _matching_files(name)
        if not matches:
            raise UserError(f"no data file at '{name}': give a .jsonl file, a folder of them, or a pattern")
        paths += matches
    for path in paths:
        if not os.access(path, os.R_OK):
            raise UserError(f"data file '{path}' cannot be read: check its permissions")
    return paths


def _matching_files(name: str) -> list[str]:
    if os.path.isfile(name):
        return [name]
    if os.path.isdir(name):
        inside = sorted(Path(name).rglob("*"))
        return [str(path) for path in inside if path.suffix in SUFFIXES and path.is_file()]
    return sorted(path for path in glob.glob(name, recursive=True) if os.path.isfile(path))


class FileDigest(NamedTuple):
    """One data file and the digest of its content."""

    path: str
    """Absolute path, without resolving symbolic links."""
    digest: str
    """BLAKE2b of the file's bytes, 128 bits as 32 hex digits."""


def content_digests(files: Files) -> list[FileDigest]:
    """The digest of each data file, in the order of `data_files(files)`.

    Every byte is read, because neither size nor modification time proves that a file is unchanged. Two lists describe
    the same data if their digests are equal in order; paths do not matter. Raises UserError for a missing or unreadable
    file.
    """
    paths = [os.path.abspath(path) for path in data_files(files)]
    return list(map(FileDigest, paths, file_digests(paths)))


def index_lines(digests: Sequence[FileDigest], num_proc: int = 1, cache_dir: str | None = None) -> Dataset:
    """A memory-mapped table of all non-blank lines of the files that `content_digests` returned.

    Columns: `file`, `line` (from 1), `start` (byte offset) and `digest`, 64 bits over path, line number and the line's
    bytes. Only b"\\n" ends a line, because a JSON string may contain other line separators, such as U+2028. The table
    is cached by the files' paths and content digests. Raises UserError if all lines are blank, a file has changed since
    it was digested, or the package datasets is missing.
    """
    with extra("train"):
        from datasets import Dataset, Features, Value
        from datasets.exceptions import DatasetGenerationError

    from longspec.data.cache import cache_folder, cached_table

    unverified = [FileDigest(file.path, "") for file in digests]
    if next(_lines(unverified), None) is None:
        names = ", ".join(file.path for file in digests[:3])
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
    """The non-blank lines of `files`, as rows of LINE_COLUMNS.

    Raises UserError at the end of a file whose bytes do not have the digest. An empty digest is not compared.
    """
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
    """File, line number and bytes of each row in a batch of `index_lines` rows.

    Raises UserError for a line that has changed since it was indexed.
    """
    handle = None
    columns = (index[name] for name in ("file", "line", "start", "digest"))
    try:
        for path, number, start, digest in zip(*columns, strict=True):
            if handle is None or handle.name != path:
                if handle is not None:
                    handle.close()
                handle = open(path, "rb")  # noqa: SIM115 (kept open for the next rows of this file)
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
    """Convert a RecordError inside the context to a UserError with file, line and field."""
    try:
        yield
    except RecordError as error:
        raise UserError(f"{path}, line {line}: {error}") from error


def parse_record(path: str, line: int, raw: bytes) -> Record:
    """The JSON object on one line, with its origin under WHERE. Raises UserError if the line is anything else."""
    # A byte order mark.
    if line == 1:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        record = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {line}: not a JSON line ({error}); put one JSON object on each line") from error
    if not isinstance(record, dict):
        raise UserError(f"{path}, line {line}: must be a JSON object with named fields, not {type(record).__name__}")
    return {**record, WHERE: f"{path}:{line}"}


def is_list_of_pairs(record: Record) -> bool:
    """Whether the record is of the kind article and holds its (article, abstract) pairs as two lists."""
    lists = isinstance(record.get("article"), list) or isinstance(record.get("abstract"), list)
    return lists and record_kind(record).name == "article"


def split_pairs(record: Record) -> list[Record]:
    """One record per (article, abstract) pair; the record itself if it is not a list of pairs.

    Two empty lists are one pair of empty texts. The pair's number is appended to WHERE and to the id, if there is one.
    Raises RecordError for lists of different lengths, or a list next to a string.
    """
    if not is_list_of_pairs(record):
        return [record]
    articles, abstracts = record["article"], record["abstract"]
    if not isinstance(articles, list) or not isinstance(abstracts, list):
        wrong = "abstract" if isinstance(articles, list) else "article"
        raise RecordError(wrong, f"must be a list like its partner, not {_type_name(record[wrong])}")
    if len(articles) != len(abstracts):
        raise RecordError("abstract", f"has {len(abstracts)} items where 'article' has {len(articles)}")

    pairs = list(zip(articles, abstracts, strict=True)) or [("", "")]
    name_keys = [key for key in ("id", WHERE) if key in record]
    records = []
    for number, (article, abstract) in enumerate(pairs):
        names = {key: f"{record[key]}#{number}" for key in name_keys}
        records.append({**record, "article": article, "abstract": abstract, **names})
    return records


def record_kind(record: Record) -> Kind:
    """The kind of a record, determined by its fields. A null field counts as missing.

    Raises RecordError if no kind fits.
    """
    # Datasets with a common schema write null for the fields that a record lacks.
    present = {name for name, value in record.items() if value is not None}
    if record.get("source") in ("", *SOURCE_TAGS):
        present.discard("source")
    for kind in KINDS:
        if kind.answer_field in present and (kind.prompt_field is None or kind.prompt_field in present):
            return kind
    raise _no_kind(record, present)


def _no_kind(record: Record, present: set[str]) -> RecordError:
    """The error for a record without a kind, which names the missing answer if there is a prompt."""
    for kind in KINDS:
        if kind.prompt_field in present:
            answers = [other.answer_field for other in KINDS if other.prompt_field == kind.prompt_field]
            return RecordError("' or '".join(answers), f"is missing or null, and '{kind.prompt_field}' needs it")
    known = dict.fromkeys(
        f"{kind.prompt_field} + {kind.answer_field}" if kind.prompt_field else kind.answer_field for kind in KINDS
    )
    names = ", ".join(sorted(set(record) - {WHERE})) or "none"
    return RecordError("text", f"is missing or null; this record has {names}; use one of: {', '.join(known)}")


def text_of(value: Any, field: str) -> str:
    """`value`, if it is a string that UTF-8 can encode. Raises RecordError otherwise."""
    if not isinstance(value, str):
        raise RecordError(field, f"must be a string, not {_type_name(value)}")
    try:
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RecordError(
            field, "holds half of a surrogate pair (\\ud800 … \\udfff), which is not valid text"
        ) from None
    return value


def _type_name(value: Any) -> str:
    return "null" if value is None else type(value).__name__
