"""Records of JSONL files: their lines, kinds and errors."""

import json
import os
import re

import pytest

from longspec.data.lines import LINES_PER_CHUNK, check_unchanged, chunks, content_digests, data_files, read_chunk
from longspec.data.records import WHERE, RecordError, located, parse_record, record_kind, split_pairs
from longspec.errors import UserError


def read_all(files) -> list[dict]:
    lines = (line for chunk in chunks(data_files(files)) for line in read_chunk(**chunk))
    return [parse_record(*line) for line in lines]


def test_files_folders_and_patterns_are_found_in_order(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name in ("b.jsonl", "a.json", "deep/c.jsonl", "deep/D.NDJSON", "note.txt"):
        (tmp_path / "in" / name).write_text("{}\n")
    inside = [str(tmp_path / "in" / name) for name in ("a.json", "b.jsonl", "deep/D.NDJSON", "deep/c.jsonl")]
    assert data_files(tmp_path / "in") == inside
    assert data_files(str(tmp_path / "in" / "*.jsonl")) == inside[1:2]
    named = [inside[3], str(tmp_path / "in" / "note.txt"), inside[0]]
    assert data_files(named) == named


def test_names_without_files_and_files_without_lines_are_errors(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("gone.jsonl", "*.jsonl", "."):
        with pytest.raises(UserError, match=re.escape(f"no data file at '{name}'")):
            data_files(name)
    with pytest.raises(UserError, match="no data files given"):
        data_files([])


def test_lines_end_at_newline_only(tmp_path):
    """A JSON string may contain the other line separators of Python and Unicode. A byte order mark is no text."""
    text = "a\u2028b\u2029c\x85d"
    file = tmp_path / "odd.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False), "", json.dumps({"text": "second"}) + "\r", "   "]
    file.write_bytes("\n".join(["\ufeff" + lines[0], *lines[1:], json.dumps({"text": "third"})]).encode())
    records = read_all(file)
    assert [record["text"] for record in records] == [text, "second", "third"]
    assert [record[WHERE] for record in records] == [f"{file}:1", f"{file}:3", f"{file}:5"]


def test_lines_are_counted_in_each_file(tmp_path):
    numbers = range(1, LINES_PER_CHUNK + 3)
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{n}"}}\n' for n in numbers))
    expected = [(f"{tmp_path}/{name}.jsonl:{number}", str(number)) for name in ("a", "b") for number in numbers]
    assert [(record[WHERE], record["text"]) for record in read_all(tmp_path)] == expected


def test_a_file_that_changes_after_it_was_digested_is_named(tmp_path):
    """The change may keep size and time."""
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "one"}\n')
    stamp, digests = file.stat().st_mtime_ns, content_digests(file)
    check_unchanged(digests)
    file.write_text('{"text": "owt"}\n')
    os.utime(file, ns=(stamp, stamp))
    with pytest.raises(UserError, match=r"data\.jsonl' changed while it was read") as error:
        check_unchanged(digests)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b'{"text": "a"', "not a JSON line"),
        (b'{"text": "\xff"}', "not a JSON line.*utf-8"),
        (b'["text"]', "must be a JSON object with named fields, not list"),
        (b"[" * 100_000, "not a JSON line"),
    ],
)
def test_a_line_that_is_no_object_names_file_and_line(raw, says):
    with pytest.raises(UserError, match=says) as error:
        parse_record("data.jsonl", 17, raw)
    assert str(error.value).startswith("data.jsonl, line 17: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"source": "What?"}, "field 'target' is missing"),
        ({"report": "a", "summary": None}, "field 'summary' is missing or null, and 'report' needs it"),
        ({"problem": "a"}, "field 'qwq' or 'solution' is missing"),
        ({"source": "code", "body": "x"}, "no text or prompt; the record has body, source; use one of"),
        ({}, "the record has none"),
    ],
)
def test_missing_fields_are_named(record, says):
    with pytest.raises(UserError, match=f"^data.jsonl, line 9: .*{says}"), located("data.jsonl", 9):
        record_kind({**record, WHERE: "data.jsonl:9"})


@pytest.mark.parametrize(("article", "abstract"), [(["a", "b"], ["x"]), (["a"], "x"), ("a", ["x"])])
def test_lists_that_do_not_pair_are_errors(article, abstract):
    with pytest.raises(RecordError, match="field 'abstract' must be a list as long as 'article'"):
        split_pairs({"article": article, "abstract": abstract, WHERE: "f:1"})
