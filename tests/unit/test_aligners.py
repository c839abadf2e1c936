"""Aligners bring every kind of record to {id, kind, prompt, answer}."""

import copy

import hydra
import pytest
from omegaconf import OmegaConf

from longspec.data.aligners import DEFAULT_ALIGNERS, add_id_aligner, common_form_aligner, rename_fields_aligner
from longspec.data.records import WHERE, RecordError

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
        ({"text": "t"}, "text", None, "t"),
        ({"target": "t"}, "text", None, "t"),
        ({"source": "book", "target": "t"}, "text", None, "t"),
        ({"source": "q", "target": "t"}, "source", "q", "t"),
        ({"article": "a", "abstract": "b"}, "article", "a", "b"),
        ({"report": "a", "summary": "b"}, "report", "a", "b"),
        ({"document": "a", "summary": "b"}, "document", "a", "b"),
        ({"transcript": "a", "summary": "b"}, "transcript", "a", "b"),
        ({"prefix": "a", "suffix": "b"}, "prefix", "a", "b"),
        ({"problem": "a", "qwq": "b"}, "problem", "a", "b"),
        ({"problem": "a", "solution": "b"}, "problem", "a", "b"),
    ],
)
def test_every_kind_has_the_common_form(record, kind, prompt, answer):
    assert align(record) == {"id": "f.jsonl:3", "kind": kind, "prompt": prompt, "answer": answer}


@pytest.mark.parametrize("field", ["messages", "conversation"])
def test_a_conversation_answers_with_its_last_assistant_turn(field):
    sample = align({field: TURNS})
    assert sample["answer"] == "2"
    assert sample["prompt"] == [{"role": turn["role"], "content": turn["content"]} for turn in TURNS[:4]]


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"text": 5}, "field 'text' must be a string, not int"),
        ({"text": ["a"]}, "field 'text' must be a string, not list"),
        ({"source": 5, "target": "t"}, "field 'source' must be a string, not int"),
        ({"report": {}, "summary": "s"}, "field 'report' must be a string, not dict"),
        ({"problem": "p", "qwq": False}, "field 'qwq' must be a string, not bool"),
        ({"messages": "hello"}, "field 'messages' must be a list of turns, not str"),
        ({"messages": []}, "field 'messages' has no turn with role 'assistant'"),
        ({"messages": TURNS[:2]}, "field 'messages' has no turn with role 'assistant'"),
        ({"conversation": [TURNS[1], "x"]}, r"field 'conversation\[1\]' must be an object"),
        ({"messages": [{"role": "user"}]}, r"field 'messages\[0\]\.content' must be a string, not null"),
        ({"messages": [{"content": "x"}]}, r"field 'messages\[0\]\.role' must be a string, not null"),
        ({"text": "half \ud83d"}, "field 'text' holds half of a surrogate pair"),
    ],
)
def test_ill_typed_fields_are_named(record, says):
    with pytest.raises(RecordError, match=says):
        align(record)


def test_ids_are_kept_as_text_or_made_from_the_place():
    assert align({"text": "t", "id": 7})["id"] == "7"
    assert align({"text": "t", "id": None})["id"] == "f.jsonl:3"
    assert align({"text": "t", "_id": "x"}, [add_id_aligner("_id"), common_form_aligner()])["id"] == "x"


def test_aligners_compose_from_a_config():
    """A Hydra list of `_target_`s makes a pipeline, here one for records with other names."""
    module = "longspec.data.aligners"
    config = OmegaConf.create(
        [
            {"_target_": f"{module}.add_id_aligner"},
            {"_target_": f"{module}.rename_fields_aligner", "names": {"question": "problem", "reply": "solution"}},
            {"_target_": f"{module}.common_form_aligner"},
        ]
    )
    sample = align({"question": "q", "reply": "r"}, hydra.utils.instantiate(config))
    assert (sample["kind"], sample["prompt"], sample["answer"]) == ("problem", "q", "r")
    assert rename_fields_aligner({"a": "b"})({"a": 1, "c": 2}) == {"b": 1, "c": 2}
