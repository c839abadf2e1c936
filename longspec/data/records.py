"""Records of JSONL files: their fields and kinds."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from longspec.data.lines import text_lines
from longspec.errors import UserError

T = TypeVar("T")
Record = dict[str, Any]
"""A JSON object from one line of a file."""
WHERE = "_where"
"""Key of a record's origin, "file:line"."""


class RecordError(UserError):
    """A problem of one record: (field or None, problem). `located` adds the file and the line."""

    def __str__(self) -> str:
        field, problem = self.args
        return problem if field is None else f"field '{field}' {problem}"


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
KIND_FIELDS = frozenset(name for kind in KINDS for name in (kind.prompt_field, kind.answer_field) if name)
"""Fields that tell a record's kind."""
SOURCE_TAGS = ("code", "book", "arxiv", "tulu-v2", "gov-report", "multi-news", "meetingbank")
"""Values of `source` in published records that name a corpus and are not prompts."""


@contextmanager
def located(path: str, line: int) -> Iterator[None]:
    """Convert a RecordError inside the context to a UserError with file, line and field."""
    try:
        yield
    except RecordError as error:
        raise UserError(f"{path}, line {line}: {error}") from error


def parse_record(path: str, line: int, raw: bytes) -> Record:
    """The JSON object on one line, with its origin under WHERE. Raises UserError if the line is anything else."""
    # A byte order mark, which editors on Windows write although JSON does not allow it.
    if line == 1:
        raw = raw.removeprefix(b"\xef\xbb\xbf")
    try:
        record = json.loads(raw.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}, line {line}: not a JSON line ({error}); put one JSON object on each line") from error
    if not isinstance(record, dict):
        problem = f"must be a JSON object with named fields, not {type(record).__name__}"
        raise UserError(f"{path}, line {line}: {problem}; put one JSON object on each line")
    return {**record, WHERE: f"{path}:{line}"}


def read_records(path: str | Path, read: Callable[[Record], T]) -> Iterator[T]:
    """What `read` makes of the record on each non-blank line. Raises UserError with file, line and field."""
    for line in text_lines(str(path)):
        record = parse_record(*line)
        with located(*line[:2]):
            value = read(record)
        yield value


def is_list_of_pairs(record: Record) -> bool:
    """Whether the record is of the kind article and holds its (article, abstract) pairs as two lists."""
    lists = isinstance(record.get("article"), list) or isinstance(record.get("abstract"), list)
    return lists and record_kind(record).name == "article"


def split_pairs(record: Record) -> list[Record]:
    """A record per (article, abstract) pair, with its number in WHERE and id. Raises RecordError for unequal lists."""
    if not is_list_of_pairs(record):
        return [record]
    articles, abstracts = record["article"], record["abstract"]
    if not isinstance(articles, list) or not isinstance(abstracts, list) or len(articles) != len(abstracts):
        raise RecordError("abstract", "must be a list as long as 'article', or both must be strings")
    # Two empty lists count as one record with an empty answer, which the log reports.
    pairs = list(zip(articles, abstracts, strict=True)) or [("", "")]
    name_keys = [key for key in ("id", WHERE) if key in record]
    records = []
    for number, (article, abstract) in enumerate(pairs):
        # Results and errors name a pair as id#0, id#1, …
        names = {key: f"{record[key]}#{number}" for key in name_keys}
        records.append({**record, "article": article, "abstract": abstract, **names})
    return records


def record_kind(record: Record) -> Kind:
    """The kind of a record by its fields, of which null ones count as missing. Raises RecordError if none fits."""
    # Datasets with a common schema write null for the fields that a record lacks.
    present = {name for name, value in record.items() if value is not None}
    # `source` is a prompt in some data sets and the name of the corpus in others.
    if record.get("source") in ("", *SOURCE_TAGS):
        present.discard("source")
    for kind in KINDS:
        if kind.answer_field in present and (kind.prompt_field is None or kind.prompt_field in present):
            return kind
    for kind in KINDS:
        if kind.prompt_field in present:
            answers = [other.answer_field for other in KINDS if other.prompt_field == kind.prompt_field]
            raise RecordError("' or '".join(answers), f"is missing or null, and '{kind.prompt_field}' needs it")
    # An aligner may have added the id.
    names = ", ".join(sorted(set(record) - {WHERE, "id"})) or "none"
    forms = dict.fromkeys(" + ".join(filter(None, kind[1:])) for kind in KINDS)
    raise RecordError(None, f"no text or prompt; the record has {names}; use one of: {', '.join(forms)}")


def text_of(value: Any, field: str) -> str:
    """`value`, if it is a string that UTF-8 can encode. Raises RecordError otherwise."""
    if not isinstance(value, str):
        raise RecordError(field, f"must be a string, not {'null' if value is None else type(value).__name__}")
    try:
        # JSON can escape one half of a surrogate pair; tokenizers fail on such text.
        value.encode("utf-8")
    except UnicodeEncodeError:
        raise RecordError(
            field, "holds half of a surrogate pair (\\ud800 … \\udfff), which is not valid text"
        ) from None
    return value
