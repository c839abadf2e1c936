"""Aligners, which convert every kind of record to {id, kind, prompt, answer}."""

import copy

import pytest

from longspec.data.aligners import DEFAULT_ALIGNERS, add_id_aligner, common_form_aligner
from longspec.data.record_fields import check_record, check_sampling
from longspec.data.records import KINDS, WHERE, RecordError, record_kind

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
        *(
            ({kind.prompt_field: "a", kind.answer_field: "b"}, kind.name, "a", "b")
            for kind in KINDS
            if kind.prompt_field
        ),
        ({"text": "t"}, "text", None, "t"),
        ({"target": "t"}, "text", None, "t"),
        ({"instruction": "a", "input": "", "output": "b"}, "instruction", "a", "b"),
        ({"instruction": "a", "input": "x", "output": "b"}, "instruction", "a\n\nx", "b"),
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
    """In the form of OpenAI and in that of ShareGPT."""
    expected = [{"role": turn["role"], "content": turn["content"]} for turn in TURNS[:4]]
    names = {"user": "human", "assistant": "gpt", "system": "system"}
    for turns in (TURNS, [{"from": names[turn["role"]], "value": turn["content"]} for turn in TURNS]):
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
    sample = align({"messages": turns})
    assert sample["prompt"] == [system, user, {"role": "tool", "content": "1", "name": "add"}]
    assert sample["answer"] == "1"


def talk(turn):
    return {"messages": [turn]}


@pytest.mark.parametrize(
    ("record", "says"),
    [
        ({"text": 5}, "field 'text' must be a string, not int"),
        ({"messages": "hello"}, "field 'messages' must be a list of turns, not str"),
        ({"messages": TURNS[:2]}, "field 'messages' has no turn with role 'assistant'"),
        ({"conversation": [TURNS[1], "x"]}, r"field 'conversation\[1\]' must be an object"),
        (talk({"role": "user"}), r"field 'messages\[0\]\.content' must be a string, not null"),
        ({"conversations": [{"from": "robot", "value": "x"}]}, r"field 'conversations\[0\]\.from' is 'robot'"),
        (talk({"role": "function", "content": "x"}), r"field 'messages\[0\]\.role' is 'function'"),
        (talk({"role": "assistant", "tool_calls": [{"id": "1"}]}), r"\[0\]\.tool_calls' would be ignored"),
        (talk({"role": "user", "content": [{"type": "image_url"}]}), r"\.content\[0\]' is of type 'image_url'"),
        ({"article": ["a", 5], "abstract": ["1", "2"]}, r"field 'article\[1\]' must be a string, not int"),
        ({"text": "half \ud83d"}, "field 'text' holds half of a surrogate pair"),
    ],
)
def test_ill_typed_fields_are_named(record, says):
    with pytest.raises(RecordError, match=says):
        align(record)


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
    ("record", "field"),
    [
        ({"messages": [QUESTION, {**ANSWER, "reasoning_content": "R"}]}, r"messages\[1\]\.reasoning_content"),
        ({"messages": [QUESTION, {**ANSWER, "weight": 0}]}, "messages' has no answer to learn"),
        ({"messages": [QUESTION, {**ANSWER, "weight": 0.5}]}, r"messages\[1\]\.weight"),
        ({"messages": [SYSTEM, QUESTION, ANSWER], "system": "R"}, "system"),
        ({"messages": [QUESTION, ANSWER], "tools": [{"type": "function"}]}, "tools"),
        ({"messages": [QUESTION, ANSWER], "chat_template_kwargs": {"enable_thinking": False}}, "chat_template_kwargs"),
        ({"messages": [QUESTION, ANSWER], "enable_thinking": False}, "enable_thinking"),
        ({"prompt": "Q", "completion": "A", "documents": ["R"]}, "documents"),
        ({"prompt": "Q", "completion": "A", "context": "R"}, "context"),
        ({"prompt": "Q", "completion": "A", "history": [["Q", "A"]]}, "history"),
        ({**ALPACA, "history": "Q"}, "history"),
        ({"prompt": "Q", "completion": "A", "weight": 0}, "weight"),
        ({"report": "Q", "summary": "A", "system": "S"}, "system"),
        ({"messages": [QUESTION, {**ANSWER, "masked": True}]}, r"messages\[1\]\.masked"),
        ({"messages": [QUESTION, ANSWER], "rejected": "B"}, "rejected"),
    ],
)
def test_fields_that_would_change_the_text_are_refused_by_name(record, field):
    with pytest.raises(RecordError, match=f"^field '{field}"):
        align(record)


def test_ids_are_kept_as_text_or_made_from_the_place():
    assert align({"text": "t", "id": 7})["id"] == "7"
    assert align({"text": "t", "id": None})["id"] == "f.jsonl:3"
    assert align({"text": "t", "_id": "x"}, [add_id_aligner("_id"), common_form_aligner()])["id"] == "x"


def test_the_choices_of_a_question_are_no_options_of_its_answer() -> None:
    check_sampling({"prompt": "Which?\nA one\nB two", "options": ["A one", "B two"]})
    with pytest.raises(RecordError, match="options"):
        check_sampling({"prompt": "Q", "options": {"temperature": 0}})
    record = {"prompt": "Read x and y. Q", "completion": "A", "documents": ["x", "y"]}
    check_record(record, record_kind(record))
