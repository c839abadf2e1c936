"""From JSONL files to records: which lines there are, where they lie, and what kind each record is."""

import glob
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset, Features, Value

from longspec.errors import UserError

Record = dict[str, Any]
Files = str | Path | Iterable[str | Path]

SUFFIXES = (".jsonl", ".json")
WHERE = "_where"  # the key under which a record carries "file:line"
LINE_FEATURES = Features(
    {"file": Value("string"), "line": Value("int64"), "start": Value("int64"), "digest": Value("int64")}
)


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


TURN_KINDS = ("messages", "conversation")
# In this order: of two kinds whose fields are all there, the first one counts.
KINDS = (
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
    with ThreadPoolExecutor(min(len(paths), os.cpu_count() or 1)) as pool:  # hashing releases the GIL
        return list(map(FileDigest, paths, pool.map(_digest, paths)))


def _digest(path: str) -> str:
    try:
        with open(path, "rb") as handle:
            return hashlib.file_digest(handle, file_hash).hexdigest()
    except OSError as error:
        raise UserError(f"data file '{path}' cannot be read ({error.strerror})") from error


def file_hash() -> Any:
    """A fresh hash object of the kind that `FileDigest.digest` is made with."""
    return hashlib.blake2b(digest_size=16)


def index_lines(files: Files, num_proc: int = 1, cache_dir: str | None = None) -> Dataset:
    """A memory-mapped table of all non-blank lines: `file`, `line` (from 1), `start` (byte offset), and a `digest` of
    these and the line.

    Lines end at b"\\n" only, for a JSON string may hold U+2028, U+0085 and the like as they are. The table is cached by
    the files' paths, sizes and modification times. Raises UserError for missing files and when no line is found.
    """
    paths = [os.path.abspath(path) for path in data_files(files)]
    if not any(True for _ in _lines([(path, 0, 0) for path in paths])):
        raise UserError(f"no record in {', '.join(paths[:3])}{' …' if len(paths) > 3 else ''}: all lines are blank")
    stamped = [(path, os.stat(path).st_size, os.stat(path).st_mtime_ns) for path in paths]
    workers = min(num_proc, len(stamped))
    return Dataset.from_generator(
        _lines,
        features=LINE_FEATURES,
        cache_dir=cache_dir,
        gen_kwargs={"files": stamped},
        num_proc=workers if workers > 1 else None,
    )


def _lines(files: list[tuple[str, int, int]]) -> Iterator[Record]:
    for path, _size, _mtime in files:
        with open(path, "rb") as handle:
            start = 0
            for number, raw in enumerate(handle, 1):
                if raw.strip():
                    digest = hashlib.blake2b(f"{path}\0{number}\0".encode(errors="surrogateescape"), digest_size=8)
                    digest.update(raw)
                    named = int.from_bytes(digest.digest(), "little", signed=True)
                    yield {"file": path, "line": number, "start": start, "digest": named}
                start += len(raw)


def read_lines(index: dict[str, list]) -> Iterator[tuple[str, int, bytes]]:
    """(file, line number, bytes) of a batch of `index_lines` rows; a file stays open while its lines follow."""
    handle = None
    try:
        for path, number, start in zip(index["file"], index["line"], index["start"], strict=True):
            if handle is None or handle.name != path:
                if handle is not None:
                    handle.close()
                handle = open(path, "rb")  # noqa: SIM115 (closed below, kept over several rows)
            handle.seek(start)
            yield path, number, handle.readline()
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


def split_pairs(record: Record) -> list[Record]:
    """One record per pair where the kind is article and its two fields are equally long lists; else the record itself.

    Two empty lists are one pair of empty texts. Each pair's id (if there is one) and place end in its number.
    """
    article, abstract = record.get("article"), record.get("abstract")
    lists = isinstance(article, list) or isinstance(abstract, list)
    if not lists or record_kind(record).name != "article":
        return [record]
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
