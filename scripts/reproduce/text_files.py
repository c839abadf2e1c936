"""The texts of `--text DIR`: meetings with queries and worked solutions, in JSONL files told apart by their fields.

A meeting is {id, context, queries: [{query, answer}]}, or one query of it in LongBench's form {input, context, answers,
_id}; a worked solution is {source, target}. Files named test*.jsonl are for evaluation alone.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from longspec.data.records import Record, RecordError, located, parse_record, text_of
from longspec.errors import UserError


@dataclass
class Meeting:
    id: str
    transcript: str
    queries: list[tuple[str, str]]
    """(query, answer)"""


@dataclass(frozen=True)
class Solution:
    id: str
    question: str
    answer: str


@dataclass
class Texts:
    """What is in the files of one side of the split."""

    meetings: list[Meeting] = field(default_factory=list)
    solutions: list[Solution] = field(default_factory=list)


def read_texts(folder: Path | None) -> tuple[Texts, Texts]:
    """(training texts, held-out texts) in all *.jsonl files below `folder`; a file of another kind is named and left.

    Raises UserError if there is no such folder or nothing to train on in it, and for a bad record: file, line, field.
    """
    train, held_out = Texts(), Texts()
    if folder is None:
        return train, held_out
    for path in sorted(folder.rglob("*.jsonl")):
        _read(path, held_out if path.name.startswith("test") else train)
    if not (train.meetings or train.solutions):
        raise UserError(
            f"--text {folder}: no meetings or worked solutions to train on in *.jsonl files there (test*.jsonl are for "
            "evaluation alone); see docs/reproduce.md for their fields"
        )
    asked = {meeting.transcript for meeting in held_out.meetings}
    train.meetings = [meeting for meeting in train.meetings if meeting.transcript not in asked]
    asked = {solution.question for solution in held_out.solutions}
    train.solutions = [solution for solution in train.solutions if solution.question not in asked]
    return train, held_out


def _read(path: Path, texts: Texts) -> None:
    by_transcript: dict[str, Meeting] = {}
    with path.open("rb") as handle:
        for number, raw in enumerate(handle, 1):
            if not raw.strip():
                continue
            record = parse_record(str(path), number, raw)
            with located(str(path), number):
                if {"source", "target"} <= record.keys():
                    question, answer = (text_of(record[name], name) for name in ("source", "target"))
                    texts.solutions.append(Solution(f"{path.stem}:{number}", question, answer))
                elif {"context", "queries"} <= record.keys() or {"context", "input", "answers"} <= record.keys():
                    transcript = text_of(record["context"], "context")
                    name = str(record.get("id", record.get("_id")) or f"{path.stem}:{number}")
                    meeting = by_transcript.setdefault(transcript, Meeting(name, transcript, []))
                    meeting.queries += _queries(record)
                else:
                    print(f"{path}: not used; its records have {', '.join(sorted(record)[:6])}", flush=True)
                    return
    texts.meetings += [meeting for meeting in by_transcript.values() if meeting.queries]


def _queries(record: Record) -> Iterator[tuple[str, str]]:
    asked = record.get("queries", [record])
    if not isinstance(asked, list) or not all(isinstance(one, dict) for one in asked):
        raise RecordError("queries", "must be a list of objects with query and answer")
    for one in asked:
        if "queries" in record:
            yield text_of(one.get("query"), "query"), text_of(one.get("answer"), "answer")
        elif not isinstance(one["answers"], list) or not one["answers"]:
            raise RecordError("answers", "must be a list with at least one answer")
        else:
            yield text_of(one["input"], "input"), text_of(one["answers"][0], "answers")
