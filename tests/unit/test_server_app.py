"""Requests to the web application: what reaches the scheduler, what is refused, and what is ignored."""

import json
from math import inf
from typing import Any

import pytest
from http_server import EOS, NAME, POSITIONS, chat_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from server_script import HELLO, TOKENIZER, Script, application, chat, ids
from starlette.testclient import TestClient
from tiny_tokenizer import VOCAB_SIZE
from transformers import GenerationConfig

from longspec.errors import UserError
from longspec.inference.request import Rule, Sampling
from longspec.inference.server.known_fields import MESSAGE_FIELDS, REQUEST_FIELDS, UNSET
from longspec.inference.server.openai_api import ChatRequest, CompletionRequest
from longspec.inference.server.served_model import ServedModel


def test_a_request_reaches_the_scheduler_with_all_its_settings(client: TestClient, script: Script) -> None:
    answer = chat(client, **HELLO, n=2, temperature=0.5, top_p=0.9, top_k=-1, seed=7, max_completion_tokens=9)
    assert [choice["message"]["content"] for choice in answer["choices"]] == ["hello", "hello"]
    first, second = script.submitted
    assert TOKENIZER.decode(first.prompt) == "<user>hi</s><a>" and first.max_new_tokens == 9
    assert (first.sampling.temperature, first.sampling.top_p, first.sampling.top_k) == (0.5, 0.9, 0)
    assert (first.sampling.seed, second.sampling.seed) == (7, 8) and first.stop_ids == {EOS}
    assert answer["usage"]["prompt_tokens"] == len(first.prompt) and answer["usage"]["completion_tokens"] == 10
    chat(client, path="completions", prompt=["ab", "c"], longspec={"speculate": False, "ignore_eos": True})
    third, fourth = script.submitted[2:]
    assert (third.prompt, fourth.prompt) == (ids("ab"), ids("c")) and third.max_new_tokens == 16
    assert not third.speculate and not third.stop_ids and third.sampling.temperature == 1
    chat(client, path="completions", prompt=[[9, 8], [7]])
    assert [request.prompt for request in script.submitted[4:]] == [[9, 8], [7]]
    chat(client, path="completions", prompt=[9, 8], max_tokens=None)
    assert script.submitted[6].prompt == [9, 8]


@pytest.mark.parametrize(
    ("fields", "param", "part"),
    [
        ({"tools": [{}]}, "tools", "not supported"),
        ({"presence_penalty": 2.5}, "presence_penalty", "from -2 to 2"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "'a' is not a token id"),
        ({"bad_words_ids": [[VOCAB_SIZE]]}, "bad_words_ids", "the vocabulary has"),
        ({"bad_words": [" "]}, "bad_words", "not blank"),
        ({"min_tokens": -1}, "min_new_tokens", "from 0 to"),
        ({"echo": True}, "echo", "not supported"),
        ({"longspec": {"\ud800": 0.1}}, None, "Invalid JSON"),
        ({"longspec": {"draft": 1}}, "longspec.draft", "not permitted"),
        ({"top_p": 0}, "top_p", "but not 0"),
        ({"n": 5}, "n", "limit of 4"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "valid array"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"messages": []}, "messages", "at least 1"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"stop": "a" * 1025}, "stop.0", "at most 1024"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages.0.tool_calls", "not supported"),
        ({"max_completion_tokens": POSITIONS}, None, "+ max_completion_tokens 4096"),
        ({"messages": HELLO["messages"] * 1025}, "messages", "at most 1024"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role", "'system', 'developer'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", "'text'"),
        ({"prompt": [1, -1]}, "prompt", "none of them empty"),
        ({"prompt": [1, VOCAB_SIZE]}, "prompt", "the target has"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "Input should be a valid integer"),
        ({"prompt": [5] * POSITIONS, "max_tokens": 0}, None, "4096 tokens: leaves no room for an answer"),
        ({"prompt": [5] * 8, "max_tokens": POSITIONS}, None, "8 tokens + max_tokens 4096: 4104 tokens, more than"),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(
    client: TestClient, script: Script, fields: dict[str, Any], param: str | None, part: str
) -> None:
    path, body = ("completions", fields) if "prompt" in fields else ("chat/completions", {**HELLO, **fields})
    response = client.post(f"/v1/{path}", content=json.dumps(body), headers={"content-type": "application/json"})
    error = response.json()["error"]
    assert response.status_code == 400 and error["type"] == "invalid_request_error"
    assert error["param"] == param and part in error["message"] and not script.submitted


def test_a_chat_whose_text_cannot_be_read_is_refused(client: TestClient, monkeypatch: pytest.MonkeyPatch) -> None:
    """A template may raise anything, and a token that was added to the tokenizer has no embedding."""
    tokenizer = chat_tokenizer()
    tokenizer.add_tokens(["<note>"])
    monkeypatch.setattr("server_script.TOKENIZER", tokenizer)
    error = chat(client, 400, messages=[{"role": "user", "content": "a <note>"}])["error"]
    assert f"token id {VOCAB_SIZE}" in error["message"] and error["param"] == "prompt"
    tokenizer.chat_template = "{{ 9 // (messages | length - 1) }}"
    error = chat(client, 400, messages=[{"role": "user", "content": "a"}], chat_template_kwargs={"a": 1})["error"]
    assert "ZeroDivisionError" in error["message"] and error["param"] == "messages"


def test_fields_at_neutral_values_are_accepted(client: TestClient, script: Script) -> None:
    """Whatever spelling a client has for "not set", in requests and in messages."""
    neutral = [{name: value} for name, values in REQUEST_FIELDS.items() for value in (*values, *UNSET)]
    neutral += [{"logit_bias": {"5": 0}}, {"top_logprobs": 2}, {"stream_options": {"include_usage": True}}]
    neutral += [{"structured_outputs": {"json": None}}, {"seed": -1}, {"max_tokens": -1}, {"add_special_tokens": False}]
    may_be_unset = ("model", "temperature", "stop", "tools", "stream_options")
    neutral += [{name: value} for name in may_be_unset for value in UNSET]
    told = [{name: value} for name, values in MESSAGE_FIELDS.items() for value in (*values, *UNSET)]
    told += [{name: {"a": 1}} for name in ("name", "cache_control")]
    for fields in neutral:
        ChatRequest.model_validate({**HELLO, **fields})
    for role in ("system", "user", "assistant"):
        for fields in told:
            ChatRequest.model_validate({"messages": [{"role": role, "content": "a", **fields}]})
    response = client.post("/v1/chat/completions", json={**HELLO, "min_p": 0.0, "max_tokens": -1})
    assert response.status_code == 200 and "warning" not in response.headers
    (request,) = script.submitted
    assert request.max_new_tokens == POSITIONS - len(request.prompt)


def test_an_answer_without_content_is_an_empty_turn(client: TestClient, script: Script) -> None:
    """So that a stored history can be sent back, parts with cache hints included."""
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    ask = {"role": "user", "name": "me", "content": [part]}
    for answer in ({}, {"content": None, "tool_calls": []}, {"content": []}, {"content": "", "refusal": None}):
        chat(client, messages=[ask, {"role": "assistant", **answer}, ask])
        assert TOKENIZER.decode(script.submitted.pop().prompt) == "<user>hi</s><assistant></s><user>hi</s><a>"


def test_unknown_fields_are_ignored_and_named_once(client: TestClient, script: Script) -> None:
    odd = {"temprature": 0.5, 'quo"te\r\n': 1, "h\u00e9": 1, "x" * 999: 1, "unset": None, "user": "me"}
    for further in ({}, {"stream": True}):
        response = client.post("/v1/chat/completions", json={**odd, **HELLO, **further})
        assert response.status_code == 200 and len(script.submitted.pop().prompt) > 0
        start = '299 longspec "ignored fields: temprature, quo?te??, h?, xxx'
        assert response.headers["warning"].startswith(start) and len(response.headers["warning"]) < 600


def test_settings_that_a_request_lacks_are_the_generation_configs(script: Script) -> None:
    config = GenerationConfig(temperature=0.6, top_p=0.9, top_k=20, max_new_tokens=7, do_sample=True)
    config.update(repetition_penalty=1.1, bad_words_ids=[[5, 6]], no_repeat_ngram_size=0)
    with TestClient(application(script, config=config)) as client:
        chat(client, **HELLO)
        neutral = {"repetition_penalty": 1, "logit_bias": {"5": 0}, "bad_words_ids": [[EOS]]}
        chat(client, **HELLO, temperature=0, top_p=1, top_k=0, max_tokens=3, **neutral)
        chat(client, path="completions", prompt="a", temperature=None)
    first, second, third = script.submitted
    assert first.sampling == third.sampling
    assert first.sampling == Sampling(0.6, 0.9, 20, repetition_penalty=1.1, rules=(Rule(6, -inf, (5,)),))
    assert second.sampling == Sampling() and (first.max_new_tokens, second.max_new_tokens) == (7, 3)
    served = ServedModel(NAME, "tree", TOKENIZER, print, frozenset(), 9, VOCAB_SIZE, GenerationConfig(top_k=-1))
    assert served.sampling({}, frozenset()) == Sampling(1.0)  # as in vLLM
    for wrong in ({"temperature": "hot"}, {"top_p": 2.0}, {"top_k": 1.5}, {"repetition_penalty": "a"}):
        config = GenerationConfig()
        config.__dict__ |= wrong
        with pytest.raises(UserError, match=f"^generation_config.{next(iter(wrong))}"):
            application(script, config=config)


def test_a_request_sets_penalties_and_rules(client: TestClient, script: Script) -> None:
    """Bad words are banned at the beginning of a text and after a space; stop tokens wait for min_tokens."""
    fields = {"presence_penalty": 0.5, "frequency_penalty": -1, "no_repeat_ngram_size": 3, "repetition_penalty": 1.2}
    chat(client, **HELLO, **fields, logit_bias={"5": -2.5}, min_tokens=4, bad_words=["ab"], typical_p=0.5)
    (request,) = script.submitted
    alone, spaced = ids("ab"), ids(" ab")
    rules = [Rule(EOS, -inf, (), 4), Rule(5, -2.5)]
    rules += [Rule(word[-1], -inf, tuple(word[:-1])) for word in (alone, spaced)]
    assert request.sampling == Sampling(1.0, typical_p=0.5, rules=tuple(rules), **fields)


@pytest.mark.parametrize(
    ("content", "kind"),
    [
        (b"{", "application/json"),
        (b"[]", "application/json"),
        (b'{"messages": ' + b"[" * 900, "application/json"),
        (json.dumps(HELLO).encode(), "text/plain"),
        (b'{"messages": [{"role": "user", "content": "a"}], "temperature": NaN}', "application/json"),
    ],
)
def test_a_malformed_body_is_a_400(client: TestClient, script: Script, content: bytes, kind: str) -> None:
    """Text that another site's page could send without asking is refused, too: the type must be application/json."""
    response = client.post("/v1/chat/completions", content=content, headers={"content-type": kind})
    assert response.status_code == 400 and response.json()["error"]["message"] and not script.submitted


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(categories=["L", "Cs", "Cc"])),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=5,
)
FIELDS = sorted(set(ChatRequest.model_fields) | set(CompletionRequest.model_fields) | set(REQUEST_FIELDS))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=3), VALUES, max_size=3), st.booleans())
def test_no_body_is_a_server_error(client: TestClient, fields: dict[str, Any], is_chat: bool) -> None:
    path, body = ("chat/completions", HELLO) if is_chat else ("completions", {"prompt": "a"})
    content = json.dumps({**body, **fields})
    response = client.post(f"/v1/{path}", content=content, headers={"content-type": "application/json"})
    assert response.status_code in (200, 400, 404), response.text
