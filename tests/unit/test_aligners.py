"""Records of JSONL files: their lines, and the aligners, which convert every kind to {id, kind, prompt, answer}."""

import copy
import json
import os
import re

import pytest

from longspec.data import lines as data_lines
from longspec.data.aligners import DEFAULT_ALIGNERS, add_id_aligner, common_form_aligner
from longspec.data.lines import check_unchanged, chunks, content_digests, data_files, read_chunk
from longspec.data.record_fields import check_record, check_sampling
from longspec.data.records import KINDS, WHERE, RecordError, located, parse_record, record_kind, split_pairs
from longspec.errors import UserError

TURNS = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1", "weight": 0},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "Thanks."},
]


def align(record, aligners=DEFAULT_ALIGNERS):
    record = {WHERE: "f.jsonl:3", **record}
    for aligner in aligners:
        before = copy.deepcopy(record)
        after = aligner(record)
        assert record == before, "an aligner changed its input"
        record = after
    return record


@pytest.mark.parametrize(
    ("record", "kind", "prompt", "answer"),
    [
        *(({prompt: "a", answer: "b"}, name, "a", "b") for name, prompt, answer in KINDS if prompt),
        ({"text": "t"}, "text", None, "t"),
        ({"target": "t"}, "text", None, "t"),
        ({"instruction": "a", "input": "", "output": "b"}, "instruction", "a", "b"),
        ({"instruction": "a", "input": "x", "output": "b"}, "instruction", "a\n\nx", "b"),
        ({"instruction": "", "input": "x", "output": "b"}, "instruction", "x", "b"),
        ({"instruction": "a", "output": "b", "text": "a b"}, "instruction", "a", "b"),
        ({"source": "", "target": "t"}, "text", None, "t"),
        ({"source": "arxiv", "text": "t"}, "text", None, "t"),
        ({"problem": "a", "qwq": "b", "solution": "c"}, "problem", "a", "b"),
        ({"text": None, "source": "gov-report", "report": "a", "summary": "b"}, "report", "a", "b"),
    ],
)
def test_every_kind_has_the_common_form(record, kind, prompt, answer):
    assert align(record) == {"id": "f.jsonl:3", "kind": kind, "prompt": prompt, "answer": answer}


@pytest.mark.parametrize("field", ["messages", "conversation", "conversations"])
def test_a_conversation_answers_with_its_last_assistant_turn(field):
    """In the form of OpenAI, in that of ShareGPT, and in a schema that has the fields of both."""
    expected = [{"role": turn["role"], "content": turn["content"]} for turn in TURNS[:4]]
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    sharegpt = [{"from": names[turn["role"]], "value": turn["content"]} for turn in TURNS]
    for turns in (TURNS, sharegpt, [{"role": None, "content": None, **turn} for turn in sharegpt]):
        sample = align({field: turns})
        assert (sample["kind"], sample["prompt"], sample["answer"]) == (field, expected, "2")


def test_openai_turns_may_be_lists_of_text_parts():
    parts = [{"type": "text", "text": "On"}, {"type": "text", "text": "e?"}]
    turns = [
        {"role": "developer", "content": "Be brief."},
        {"role": "user", "content": parts},
        {"role": "tool", "content": "1", "name": "add", "tool_call_id": "7"},
        {"role": "assistant", "content": [{"type": "text", "text": "1"}], "tool_calls": []},
    ]
    system, user = {"role": "system", "content": "Be brief."}, {"role": "user", "content": "One?"}
    expected = {"prompt": [system, user, {"role": "tool", "content": "1", "name": "add"}], "answer": "1"}
    assert align({"messages": turns}).items() >= expected.items()


QUESTION, ANSWER = {"role": "user", "content": "Q"}, {"role": "assistant", "content": "A"}
SYSTEM = {"role": "system", "content": "S"}
ALPACA = {"instruction": "Q", "output": "A"}
SHAREGPT = [{"from": "human", "value": "Q"}, {"from": "gpt", "value": "A"}]


@pytest.mark.parametrize(
    ("record", "prompt"),
    [
        ({"messages": [QUESTION, ANSWER], "system": "S"}, [SYSTEM, QUESTION]),
        ({"conversations": SHAREGPT, "system": "S"}, [SYSTEM, QUESTION]),
        ({"messages": [SYSTEM, QUESTION, ANSWER], "system_prompt": "S"}, [SYSTEM, QUESTION]),
        ({**ALPACA, "system": "S", "history": [["Q", "A"]]}, [SYSTEM, QUESTION, ANSWER, QUESTION]),
        ({"prompt": "Q", "completion": "A", "system_prompt": "S"}, [SYSTEM, QUESTION]),
        ({"messages": [QUESTION, ANSWER, QUESTION, {**ANSWER, "content": "B", "weight": 0}]}, [QUESTION]),
        ({"messages": [QUESTION, {**ANSWER, "train": True}], "tools": "[]", "system": ""}, [QUESTION]),
        ({"prompt": "Q", "completion": "A", "temperature": 0.7, "context": None, "weight": 1}, "Q"),
        ({"messages": [QUESTION, {**ANSWER, "masked": False, "loss_mask": 1}], "train": True}, [QUESTION]),
        ({"prompt": "Given C, Q?", "completion": "A", "question": "Q?", "context": "C"}, "Given C, Q?"),
    ],
)
def test_fields_next_to_the_text_are_used(record, prompt):
    """System turns and history become part of the prompt; an answer of weight 0 is not the one to learn."""
    sample = align(record)
    assert (sample["prompt"], sample["answer"]) == (prompt, "A")


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"text": 5}, "field 'text' must be a string, not int"),
        ({"messages": "hello"}, "field 'messages' must be a list of turns, not str"),
        ({"messages": TURNS[:2]}, "field 'messages' has no turn with role 'assistant'"),
        ({"conversation": [TURNS[1], "x"]}, r"field 'conversation\[1\]' must be an object"),
        ({"messages": [{"role": "user"}]}, r"field 'messages\[0\]\.content' must be a string, not null"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, r"field 'conversations\[0\]\.from' is 'robot'"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, r"\[0\]\.tool_calls' would be ignored"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, r"content\[0\]' is of type 'image_url'"),
        ({"article": ["a", 5], "abstract": ["1", "2"]}, r"field 'article\[1\]' must be a string, not int"),
        ({"text": "half \ud83d"}, "field 'text' holds half of a surrogate pair"),
        ({"messages": [QUESTION, {**ANSWER, "reasoning_content": "R"}]}, r"^field 'messages\[1\]\.reasoning_content"),
        ({"messages": [QUESTION, {**ANSWER, "weight": 0}]}, "^field 'messages' has no answer to learn"),
        ({"messages": [SYSTEM, QUESTION, ANSWER], "system": "R"}, "^field 'system"),
        ({"messages": [QUESTION, ANSWER], "tools": [{"type": "function"}]}, "^field 'tools"),
        ({"messages": [QUESTION, ANSWER], "chat_template_kwargs": {"enable_thinking": False}}, "^field 'chat_template"),
        ({"prompt": "Q", "completion": "A", "documents": ["R"]}, "^field 'documents"),
        ({"prompt": "Q", "completion": "A", "context": "R"}, "^field 'context"),
        ({"prompt": "Q", "completion": "A", "history": [["Q", "A"]]}, "^field 'history"),
        ({**ALPACA, "history": "Q"}, "^field 'history"),
        ({"prompt": "Q", "completion": "A", "weight": 0}, "^field 'weight"),
        ({"report": "Q", "summary": "A", "system": "S"}, "^field 'system"),
        ({"messages": [QUESTION, {**ANSWER, "masked": True}]}, r"^field 'messages\[1\]\.masked"),
        ({"messages": [QUESTION, ANSWER], "rejected": "B"}, "^field 'rejected"),
    ],
)
def test_fields_that_are_ill_typed_or_would_change_the_text_are_refused_by_name(record, says):
    with pytest.raises(RecordError, match=says):
        align(record)


def test_ids_are_kept_as_text_or_made_from_the_place():
    assert align({"text": "t", "id": 7})["id"] == "7"
    assert align({"text": "t", "id": None})["id"] == "f.jsonl:3"
    assert align({"text": "t", "id": "half \ud83d"})["id"] == "half \\ud83d"
    assert align({"text": "t", "_id": "x"}, [add_id_aligner("_id"), common_form_aligner()])["id"] == "x"


def test_the_choices_of_a_question_are_no_options_of_its_answer() -> None:
    check_sampling({"prompt": "Which?\nA one\nB two", "options": ["A one", "B two"]})
    with pytest.raises(RecordError, match="options"):
        check_sampling({"prompt": "Q", "options": {"temperature": 0}})
    record = {"prompt": "Read x and y. Q", "completion": "A", "documents": ["x", "y"]}
    check_record(record, record_kind(record))


def read_all(files) -> list[dict]:
    return [parse_record(*line) for chunk in chunks(data_files(files)) for line in read_chunk(**chunk)]


def test_files_folders_and_patterns_are_found_in_order_or_named(tmp_path, monkeypatch):
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for name in ("b.jsonl", "a.json", "deep/c.jsonl", "deep/D.NDJSON", "note.txt"):
        (tmp_path / "in" / name).write_text("{}\n")
    inside = [str(tmp_path / "in" / name) for name in ("a.json", "b.jsonl", "deep/D.NDJSON", "deep/c.jsonl")]
    assert data_files(tmp_path / "in") == inside
    assert data_files(str(tmp_path / "in" / "*.jsonl")) == inside[1:2]
    named = [inside[3], str(tmp_path / "in" / "note.txt"), inside[0]]
    assert data_files(named) == named
    (tmp_path / "empty").mkdir()
    monkeypatch.chdir(tmp_path)
    for name in ("gone.jsonl", "*.jsonl", "empty"):
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


def test_lines_are_counted_in_each_file_whose_chunks_are_bounded(tmp_path, monkeypatch):
    """The line that exceeds the bound is the last one, because processes share the chunks of files in any order."""
    monkeypatch.setattr(data_lines, "CHUNK_BYTES", 60)
    texts = [*"1234567", "8" * 100, "9"]
    for name in ("a", "b"):
        (tmp_path / f"{name}.jsonl").write_text("".join(f'{{"text": "{text}"}}\n' for text in texts))
    expected = [(f"{tmp_path}/{name}.jsonl:{n}", text) for name in ("a", "b") for n, text in enumerate(texts, 1)]
    assert [(record[WHERE], record["text"]) for record in read_all(tmp_path)] == expected
    assert [chunk["line"] for chunk in chunks(data_files(tmp_path))] == [1, 6, 9] * 2


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
        (b'["text"]', "must be a JSON object with named fields, not list; put one JSON object on each"),
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
        ({"source": "code", "body": "x", "id": "f:9"}, "no text or prompt; the record has body, source; use one of"),
        ({}, "the record has none"),
    ],
)
def test_missing_fields_and_lists_that_do_not_pair_are_named(record, says):
    with pytest.raises(UserError, match=f"^data.jsonl, line 9: .*{says}"), located("data.jsonl", 9):
        record_kind({**record, WHERE: "data.jsonl:9"})
    for article, abstract in ((["a", "b"], ["x"]), (["a"], "x"), ("a", ["x"])):
        with pytest.raises(RecordError, match="field 'abstract' must be a list as long as 'article'"):
            split_pairs({"article": article, "abstract": abstract, WHERE: "f:1"})
