"""Records of JSONL files: their lines, kinds and errors."""

import json
import os
import shutil
from pathlib import Path

import pytest

from longspec.data.lines import Block, content_digests, data_files, line_blocks, read_lines
from longspec.data.records import WHERE, RecordError, located, parse_record, record_kind, split_pairs
from longspec.errors import UserError


def read_all(files) -> list[dict]:
    return [parse_record(*line) for line in read_lines(blocks(files))]


def blocks(files) -> list[Block]:
    return list(line_blocks(content_digests(files), 2))


def test_files_folders_and_patterns_are_found_in_order(tmp_path):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name in ("b.jsonl", "a.json", "deep/c.jsonl", "deep/D.NDJSON", "note.txt"):
        (tmp_path / "in" / name).write_text("{}\n")
    inside = [str(tmp_path / "in" / name) for name in ("a.json", "b.jsonl", "deep/D.NDJSON", "deep/c.jsonl")]
    assert data_files(tmp_path / "in") == inside
    assert data_files(str(tmp_path / "in" / "*.jsonl")) == inside[1:2]
    assert data_files([inside[3], str(tmp_path / "in" / "note.txt"), inside[0]]) == [
        inside[3],
        str(tmp_path / "in" / "note.txt"),
        inside[0],
    ]


def test_content_digests_follow_the_bytes_alone(tmp_path):
    """Rewriting a file with the same size and time changes its digest. A copy at another path has the same digest."""
    (tmp_path / "in").mkdir()
    for name, text in (("a", "one\n"), ("b", "two\n")):
        (tmp_path / "in" / f"{name}.jsonl").write_text(text)
    first = content_digests(tmp_path / "in")
    assert [Path(one.path).name for one in first] == ["a.jsonl", "b.jsonl"]
    shutil.copytree(tmp_path / "in", tmp_path / "copy")
    assert [one.digest for one in content_digests(tmp_path / "copy")] == [one.digest for one in first]
    stamp = (tmp_path / "in" / "b.jsonl").stat().st_mtime_ns
    (tmp_path / "in" / "b.jsonl").write_text("owt\n")
    os.utime(tmp_path / "in" / "b.jsonl", ns=(stamp, stamp))
    second = content_digests(tmp_path / "in")
    assert second[0] == first[0] and second[1] != first[1]


@pytest.mark.parametrize("name", ["gone.jsonl", "*.jsonl", "."])
def test_a_name_with_nothing_behind_it_is_named(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match="no data file at") as error:
        data_files(name)
    assert f"'{name}'" in str(error.value)


def test_no_files_and_only_blank_lines_are_errors(tmp_path):
    (tmp_path / "blank.jsonl").write_text("\n  \n")
    with pytest.raises(UserError, match="no data files given"):
        data_files([])
    with pytest.raises(UserError, match=r"blank\.jsonl"):
        blocks(tmp_path / "blank.jsonl")


def test_lines_end_at_newline_only(tmp_path):
    """A JSON string may contain the other line separators of Python and Unicode."""
    text = "a\u2028b\u2029c\x85d"
    file = tmp_path / "odd.jsonl"
    lines = [json.dumps({"text": text}, ensure_ascii=False), "", json.dumps({"text": "second"}) + "\r", "   "]
    file.write_bytes("\n".join([*lines, json.dumps({"text": "third"})]).encode())
    records = read_all(file)
    assert [record["text"] for record in records] == [text, "second", "third"]
    assert [record[WHERE] for record in records] == [f"{file}:1", f"{file}:3", f"{file}:5"]


def test_a_byte_order_mark_is_no_part_of_the_first_record(tmp_path):
    (tmp_path / "bom.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "a"}\n')
    assert read_all(tmp_path / "bom.jsonl")[0]["text"] == "a"


def test_lines_are_counted_in_each_file_and_read_in_any_order(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{name}{n}"}}\n' for n in range(3)))
    first, second, third, fourth = blocks(tmp_path)
    records = [parse_record(*line) for line in read_lines([fourth, first, second])]
    assert [record["text"] for record in records] == ["b2", "a0", "a1", "a2"]
    assert [block.line for block in (first, second, third, fourth)] == [1, 3, 1, 3]


def test_a_changed_file_is_read_again(tmp_path):
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "old"}\n')
    assert len(read_all(file)) == 1
    file.write_text('{"text": "new"}\n{"text": "more"}\n')
    assert [record["text"] for record in read_all(file)] == ["new", "more"]


def test_a_file_that_changes_after_it_was_digested_is_named(tmp_path):
    """The change happens before the lines are listed, or before they are tokenized, and may keep size and time."""
    file = tmp_path / "data.jsonl"
    file.write_text('{"text": "one"}\n{"text": "two"}\n')
    stamp, digests = file.stat().st_mtime_ns, content_digests(file)
    listed = blocks(file)
    file.write_text('{"text": "one"}\n{"text": "owt"}\n')
    os.utime(file, ns=(stamp, stamp))
    with pytest.raises(UserError, match=r"data\.jsonl' changed while it was read") as error:
        list(read_lines(listed))
    assert "\n" not in str(error.value)
    with pytest.raises(UserError, match=r"data\.jsonl' changed while it was read"):
        list(line_blocks(digests, 2))
    assert [record["text"] for record in read_all(file)] == ["one", "owt"]


@pytest.mark.parametrize(
    ("raw", "says"),
    [
        (b'{"text": "a"', "not a JSON line"),
        (b"[", "not a JSON line"),
        (b'{"text": "\xff"}', "not a JSON line.*utf-8"),
        (b'["text"]', "must be a JSON object with named fields, not list"),
        (b"3", "must be a JSON object with named fields, not int"),
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
        ({"prefix": "a"}, "field 'suffix' is missing"),
        ({"prompt": "a"}, "field 'completion' is missing"),
        ({"instruction": "a", "input": "b"}, "field 'output' is missing"),
        ({"source": "code", "body": "x"}, "field 'text' is missing or null; this record has body, source; use one of"),
        ({}, "this record has none"),
    ],
)
def test_missing_fields_are_named(record, says):
    with pytest.raises(RecordError, match=says):
        record_kind({**record, WHERE: "data.jsonl:1"})


def test_location_is_added_in_one_line():
    with pytest.raises(UserError) as error, located("data.jsonl", 9):
        record_kind({"report": "a"})
    assert str(error.value).startswith("data.jsonl, line 9: field 'summary' is missing")


@pytest.mark.parametrize(
    ("article", "abstract", "says"),
    [
        (["a", "b"], ["x"], "field 'abstract' has 1 items where 'article' has 2"),
        (["a"], "x", "field 'abstract' must be a list.*not str"),
        ("a", ["x"], "field 'article' must be a list.*not str"),
    ],
)
def test_lists_that_do_not_pair_are_errors(article, abstract, says):
    with pytest.raises(RecordError, match=says):
        split_pairs({"article": article, "abstract": abstract, WHERE: "f:1"})
