"""The web application over a scheduler that plays given events: refusals, limits, errors and disconnects."""

import asyncio
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from math import inf
from time import perf_counter
from types import SimpleNamespace
from typing import Any

import pytest
from http_server import EOS, NAME, POSITIONS, chat_tokenizer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from starlette.applications import Starlette
from starlette.testclient import TestClient
from tiny_tokenizer import VOCAB_SIZE
from transformers import GenerationConfig

import longspec.inference.server.app
from longspec.data.templates import conversation_text, encode_texts
from longspec.errors import UserError
from longspec.inference.arguments import check_request
from longspec.inference.engine.requests import (
    Event,
    Finished,
    OnEvent,
    PromptScores,
    QueueFull,
    Request,
    RequestTooLarge,
    Snapshot,
    Ticket,
    Timings,
    Tokens,
    Tree,
)
from longspec.inference.request import Rule, Sampling
from longspec.inference.server.app import build_app
from longspec.inference.server.known_fields import MESSAGE_FIELDS, REQUEST_FIELDS, UNSET
from longspec.inference.server.limits import Limits
from longspec.inference.server.openai_api import ChatRequest, CompletionRequest
from longspec.inference.server.replies import server_sent_event
from longspec.inference.server.served_model import ServedModel

TOKENIZER = chat_tokenizer()
LIMITS = Limits(max_choices=4, max_body_bytes=100_000)
HELLO: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


def ids(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def said(text: str, **fields: Any) -> Tokens:
    return Tokens(ids(text), ["target"] * len(ids(text)), **fields)


@dataclass
class Script:
    """A scheduler that answers each request with the same events, from another thread."""

    events: list[Event] = field(default_factory=lambda: [said("hello"), Finished("stop")])
    refusal: Exception | None = None
    room: int = 100
    """Requests that are taken before the refusal."""
    healthy: bool = True
    submitted: list[Request] = field(default_factory=list)
    cancelled: list[Request] = field(default_factory=list)
    cached: list[int] = field(default_factory=lambda: [0])
    """Cached tokens of the requests' prompts, in turn."""
    thread: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1))

    def submit(self, request: Request, on_event: OnEvent) -> Ticket:
        check_request(request, SimpleNamespace(vocab_size=VOCAB_SIZE), POSITIONS)  # type: ignore[arg-type]
        if self.refusal is not None and len(self.submitted) >= self.room:
            raise self.refusal
        self.submitted.append(request)
        self.thread.submit(lambda: [on_event(event) for event in self.events])
        cached = self.cached[(len(self.submitted) - 1) % len(self.cached)]
        return Ticket(request, on_event, perf_counter(), cached_prompt_tokens=cached)

    def cancel(self, ticket: Ticket) -> None:
        self.cancelled.append(ticket.request)

    def snapshot(self) -> Snapshot:
        fields = {"requests": 7, "finished": {"stop": 5}, "row_rounds": 4, "decoded_tokens": 10}
        error = "" if self.healthy else "out of memory"
        rows = {"max_rows": 16, "capacity": POSITIONS, "queued": 2, "running": 3}
        return Snapshot(healthy=self.healthy, error=error, **rows, **fields)


def application(
    script: Script, limits: Limits = LIMITS, config: GenerationConfig | None = None, **options: Any
) -> Starlette:
    def encode(prompts: list[Any], variables: Any = None) -> list[list[int]]:
        texts = [p if isinstance(p, str) else conversation_text(p, "llama", TOKENIZER, "tokenizer") for p in prompts]
        return encode_texts(texts, TOKENIZER)

    served = ServedModel(
        NAME, "tree", TOKENIZER, encode, frozenset({EOS}), POSITIONS, VOCAB_SIZE, config or GenerationConfig()
    )
    return build_app(served, script, limits, **options)


@pytest.fixture
def script() -> Script:
    return Script()


@pytest.fixture
def client(script: Script) -> Iterator[TestClient]:
    with TestClient(application(script)) as client:
        yield client


def chat(client: TestClient, code: int = 200, path: str = "chat/completions", **body: Any) -> Any:
    response = client.post(f"/v1/{path}", json=body)
    assert response.status_code == code, response.text
    return response.json()


def events(client: TestClient, path: str = "chat/completions", **body: Any) -> list[Any]:
    """The server-sent events of a stream, without [DONE]."""
    response = client.post(f"/v1/{path}", json={**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    *chunks, done = response.text.removesuffix("\n\n").split("\n\n")
    assert done == "data: [DONE]"
    return [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]


async def talk(app: Starlette, body: Any, receive: Any, send: Any) -> None:
    """Send a chat request without a server; receive: the messages after the body's, send: takes the answer's. body:
    None for a body of which no end arrives."""
    content = b"{" if body is None else json.dumps(body).encode()
    messages = [{"type": "http.request", "body": content, "more_body": body is None}]

    async def receive_body_first() -> Any:
        return messages.pop() if messages else await receive()

    headers = [(b"content-type", b"application/json"), (b"host", b"localhost")]
    scope = {"type": "http", "method": "POST", "path": "/v1/chat/completions", "headers": headers}
    scope |= {"query_string": b"", "http_version": "1.1", "scheme": "http", "server": ("localhost", 80)}
    await asyncio.wait_for(app(scope, receive_body_first, send), 10)


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
        ({"logit_bias": {"5": 101}}, "logit_bias", "from -100 to 100"),
        ({"logit_bias": {"a": 1}}, "logit_bias", "'a' is not a token id"),
        ({"bad_words_ids": [[VOCAB_SIZE]]}, "bad_words_ids", "the vocabulary has"),
        ({"bad_words": [" "]}, "bad_words", "not empty"),
        ({"min_tokens": -1}, "min_new_tokens", "from 0 to"),
        ({"top_logprobs": 21, "logprobs": True}, "top_logprobs", "less than or equal to 20"),
        ({"echo": True}, "echo", "not supported"),
        ({"n": 3, "best_of": 2}, "best_of", "not supported"),
        ({"longspec": {"\ud800": 0.1}}, None, "Invalid JSON"),
        ({"stop": "\ud800"}, None, "Invalid JSON"),
        ({"longspec": {"draft": 1}}, "longspec.draft", "not permitted"),
        ({"temperature": -1}, "temperature", "must be 0 (greedy) or from"),
        ({"top_p": 0}, "top_p", "but not 0"),
        ({"n": 5}, "n", "limit of 4"),
        ({"stop": ["a"] * 17}, "stop", "at most 16"),
        ({"stop": "a" * 1025}, "stop.0", "at most 1024"),
        ({"seed": 2**63}, "seed", "less than"),
        ({"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        ({"messages": [{"role": "user", "content": None}]}, "messages.0.content", "valid array"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "a"}]}]}, "messages.0.tool_calls", "not supported"),
        ({"messages": [{"role": "assistant", "reasoning_content": "a"}]}, "messages.0.reasoning_content", "not supp"),
        ({"max_tokens": POSITIONS}, None, "more than the 4096 positions"),
        ({"messages": []}, "messages", "at least 1"),
        ({"messages": HELLO["messages"] * 1025}, "messages", "at most 1024"),
        ({"messages": [{"role": "tool", "content": "a"}]}, "messages.0.role", "'system', 'developer'"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0.content.0.type", "'text'"),
        ({"prompt": []}, "prompt", "none of them empty"),
        ({"prompt": [1, -1]}, "prompt", "none of them empty"),
        ({"prompt": [1, VOCAB_SIZE]}, "prompt", "the target has"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "less than or equal to 20"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "Input should be a valid integer"),
        ({"prompt": "a", "best_of": 2}, "best_of", "not supported"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "not supported"),
        ({"prompt": [5] * 8, "max_tokens": POSITIONS}, None, "8 tokens + max_new_tokens 4096"),
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
    monkeypatch.setattr(f"{__name__}.TOKENIZER", tokenizer)
    error = chat(client, 400, messages=[{"role": "user", "content": "a <note>"}])["error"]
    assert f"token id {VOCAB_SIZE}" in error["message"] and error["param"] == "prompt"
    tokenizer.chat_template = "{{ 9 // (messages | length - 1) }}"
    error = chat(client, 400, messages=[{"role": "user", "content": "a"}])["error"]
    assert "ZeroDivisionError" in error["message"] and error["param"] == "messages"


def test_fields_at_neutral_values_are_accepted(client: TestClient, script: Script) -> None:
    """Whatever spelling a client has for "not set", in requests and in messages."""
    neutral = [{name: value} for name, values in REQUEST_FIELDS.items() for value in (*values, *UNSET)]
    neutral += [{"logit_bias": {"5": 0}}, {"top_logprobs": 2}, {"stream_options": {"include_usage": True}}]
    neutral += [{"structured_outputs": {"json": None}}, {"seed": -1}, {"max_tokens": -1}, {"add_special_tokens": False}]
    neutral += [
        {name: value} for name in ("model", "temperature", "stop", "tools", "stream_options") for value in UNSET
    ]
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


def test_a_body_above_the_limit_is_not_read(client: TestClient) -> None:
    response = client.post("/v1/completions", content=b" " * 200_000, headers={"content-type": "application/json"})
    assert response.status_code == 413 and response.headers["connection"] == "close"
    assert "100000 bytes" in response.json()["error"]["message"]


def test_a_body_must_arrive_in_time(script: Script) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(talk(application(script, Limits(body_seconds=0.01)), None, asyncio.Event().wait, send))
    assert sent[0]["status"] == 408 and not script.submitted


def test_a_full_queue_is_a_429_that_says_when_to_come_back(script: Script) -> None:
    script.refusal, script.room = QueueFull("the queue is full"), 1
    with TestClient(application(script)) as client:
        response = client.post("/v1/chat/completions", json={**HELLO, "n": 2})
        assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "rate_limit_error"
        assert script.cancelled == script.submitted != []  # the first choice gives its place back
        script.refusal, script.room = RequestTooLarge("5000 slots needed, 4096 there"), 0
        assert "5000" in chat(client, 400, **HELLO)["error"]["message"]
        assert chat(client, 400, **HELLO, temperature=1e-37)["error"]["param"] == "temperature"


def test_a_stop_string_ends_the_answer_and_the_row(client: TestClient, script: Script) -> None:
    script.events = [said("one t"), said("wo three"), Finished("length")]
    answer = chat(client, **HELLO, stop="two", logprobs=False)
    assert answer["choices"][0]["message"]["content"] == "one "
    assert answer["usage"]["completion_tokens"] == len("one two"), "tokens after the stop string are not counted"
    assert answer["choices"][0]["finish_reason"] == "stop" and script.cancelled == script.submitted
    chunks = events(client, **HELLO, stop=["two"])
    texts = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert "".join(texts) == "one " and chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chat(client, **HELLO, stop=["three!"])["choices"][0]["message"]["content"] == "one two three"
    # A special token is no part of the text, but a stop string can name it, with text around it.
    script.events = [said("one"), said("</s>"), said("<s>two"), Finished("length")]
    for stop, expected in (
        ("</s>", "one"),
        ("e</s>", "on"),
        ("</s><s>t", "one"),
        ("<s>", "one"),
        ("</s>tw", "onetwo"),
    ):
        choice = chat(client, **HELLO, stop=stop)["choices"][0]
        assert choice["message"]["content"] == expected
        assert choice["finish_reason"] == ("length" if expected == "onetwo" else "stop")


def test_reused_prompt_tokens_are_counted_once(client: TestClient, script: Script) -> None:
    """Of a prompt with several choices, and of an answer that a stop string ends before the engine does."""
    script.cached, script.events = [3, 5], [said("hello")]
    for path, body, expected in (
        ("chat/completions", {**HELLO, "n": 2}, 3),
        ("completions", {"prompt": ["abcdefg", "hijklmn"]}, 8),
    ):
        usage = chat(client, path=path, **body, stop="l")["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == expected <= usage["prompt_tokens"]


@pytest.mark.parametrize("mark", ["\x85", "\u2028", "\u2029"])
def test_an_event_is_one_line_for_every_client(mark: str) -> None:
    body = {"choices": [{"delta": {"content": f"a{mark}b"}}]}
    (line, end) = server_sent_event(body).splitlines()
    assert json.loads(line.removeprefix("data: ")) == body and not end


def test_chunks_have_openais_form_and_the_extension_on_request(client: TestClient, script: Script) -> None:
    tree = Tree(ids("xhz"), [-1, 0, 0], [1], ["draft"])
    script.events = [
        said("a"),
        Tokens(ids("hé"), ["draft", "target", "target"], tree=tree),
        Finished("length", timings=Timings(decode_s=2.0)),
    ]
    script.cached = [4]
    chunks = events(client, **HELLO, stream_options={"include_usage": True})
    assert [chunk["choices"][0]["delta"] for chunk in chunks[:-1]] == [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"content": "hé"},
        {},
    ]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1 and "longspec" not in str(chunks)
    assert chunks[-1]["choices"] == [] and chunks[0]["usage"] is None
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    *_, round_chunk, end = events(client, **HELLO, longspec={"tokens": True})
    assert round_chunk["longspec"]["tokens"] == [
        {"text": "h", "origin": "draft"},
        {"text": "", "origin": "target"},
        {"text": "é", "origin": "target"},
    ]
    assert round_chunk["longspec"]["tree"] == {
        "texts": ["x", "h", "z"],
        "parents": [-1, 0, 0],
        "accepted": [1],
        "origins": ["draft"],
    }
    assert end["longspec"]["timings"]["decode_s"] == 2


def test_logprobs_are_those_of_the_tokens_that_are_shown(client: TestClient, script: Script) -> None:
    script.events = [said("ab", logprobs=[-1.0, -2.0]), said("cd", logprobs=[-3.0, -4.0]), Finished("length")]
    content = chat(client, **HELLO, logprobs=True, stop="d")["choices"][0]["logprobs"]["content"]
    assert [(entry["token"], entry["logprob"], entry["bytes"]) for entry in content] == [
        ("a", -1, [97]),
        ("b", -2, [98]),
        ("c", -3, [99]),
    ]
    fields = chat(client, path="completions", prompt="x", logprobs=0)["choices"][0]["logprobs"]
    assert fields == {
        "tokens": list("abcd"),
        "token_logprobs": [-1, -2, -3, -4],
        "top_logprobs": None,
        "text_offset": [0, 1, 2, 3],
    }
    assert chat(client, **HELLO)["choices"][0]["logprobs"] is None


def test_alternatives_are_told_by_text(client: TestClient, script: Script) -> None:
    a, _, part = ids("ab\xe9")[:3]  # the last one is half of a character
    script.events = [said("b", logprobs=[-2.0], alternatives=[[(a, -0.5), (part, -1.0), (part + 1, -1.5)]])]
    script.events += [Finished("length")]
    (entry,) = chat(client, **HELLO, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [(best["token"], best["logprob"], best["bytes"]) for best in entry["top_logprobs"]] == [
        ("a", -0.5, [97]),
        ("\ufffd", -1.0, None),
        ("\ufffd", -1.5, None),
    ]
    fields = chat(client, path="completions", prompt="x", logprobs=3)["choices"][0]["logprobs"]
    assert fields["top_logprobs"] == [{"a": -0.5, "\ufffd": -1.0, "b": -2.0}]
    assert [(request.logprobs, request.alternatives) for request in script.submitted] == [(True, 2), (True, 3)]


def test_an_echoed_prompt_begins_the_answer(client: TestClient, script: Script) -> None:
    """Also in a stream, for every choice, and alone."""
    script.events = [said("cd"), Finished("stop")]
    body: dict[str, Any] = {"prompt": ["ab", "<s>\xe9"], "echo": True, "n": 2}
    both = chat(client, path="completions", **body)
    assert [choice["text"] for choice in both["choices"]] == ["abcd", "abcd", "<s>\xe9cd", "<s>\xe9cd"]
    chunks = [chunk["choices"][0] for chunk in events(client, "completions", **body)]
    assert "".join(chunk["text"] for chunk in chunks if chunk["index"] == 3) == "<s>\xe9cd"
    alone = chat(client, path="completions", prompt=ids("ab"), echo=True, max_tokens=0)
    assert alone["choices"][0]["text"] == "ab" and alone["choices"][0]["finish_reason"] == "length"
    assert alone["usage"]["completion_tokens"] == 0 and not any(request.scores_prompt for request in script.submitted)


def test_the_tokens_of_an_echoed_prompt_have_logprobs(client: TestClient, script: Script) -> None:
    x, y = ids("xy")
    script.events = [
        PromptScores([-1.0], [[(x, -0.5)]]),
        PromptScores([-2.0], [[(y, -2.0)]]),
        said("d", logprobs=[-3.0], alternatives=[[(x, -0.1)]]),
        Finished("stop"),
    ]
    fields = chat(client, path="completions", prompt="abc", echo=True, logprobs=1)["choices"][0]["logprobs"]
    assert fields == {
        "tokens": list("abcd"),
        "token_logprobs": [None, -1, -2, -3],
        "top_logprobs": [None, {"x": -0.5, "b": -1}, {"y": -2, "c": -2}, {"x": -0.1, "d": -3}],
        "text_offset": [0, 1, 2, 3],
    }
    assert script.submitted[0].scores_prompt and script.submitted[0].alternatives == 1


def test_a_failed_request_is_an_error_in_each_form(client: TestClient, script: Script) -> None:
    script.events = [said("a"), Finished("error", "the target's logits are NaN")]
    assert "NaN" in chat(client, 500, **HELLO)["error"]["message"]
    assert events(client, **HELLO)[-1]["error"]["type"] == "server_error"
    script.events = [said("a"), Finished("cancelled")]
    assert "stopped" in chat(client, 503, **HELLO)["error"]["message"]


def test_a_request_that_takes_too_long_gives_its_row_back(script: Script) -> None:
    script.events = [said("a")]
    with TestClient(application(script, Limits(max_seconds=0.05))) as client:
        assert chat(client, 504, **HELLO)["error"]["code"] == "timeout"
        assert events(client, **HELLO)[-1]["error"]["code"] == "timeout"
    assert script.cancelled == script.submitted and len(script.submitted) == 2


def test_a_client_that_does_not_read_gives_its_row_back(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(longspec.inference.server.app, "LAST_EVENTS_S", 0.05)
    script.events = [said("a")]

    async def send(message: Any) -> None:
        await asyncio.Event().wait()

    limits = Limits(max_seconds=0.05)
    asyncio.run(talk(application(script, limits), {**HELLO, "stream": True}, asyncio.Event().wait, send))
    assert script.cancelled == script.submitted != []


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_disconnects_gives_its_row_back(script: Script, stream: bool) -> None:
    """Nothing is sent to it once its request is known to be gone."""
    script.events, sent = [said("a")], []

    async def disconnect() -> Any:
        while not script.submitted:
            await asyncio.sleep(0)
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(talk(application(script), {**HELLO, "stream": stream}, disconnect, send))
    assert script.cancelled == script.submitted != []
    assert not any(b"[DONE]" in message.get("body", b"") for message in sent)


def test_a_key_guards_everything_but_health_and_the_page(script: Script) -> None:
    with TestClient(application(script, api_key="secret")) as client:
        paths = ("/v1/models", f"/v1/models/{NAME}", "/metrics")
        for headers in ({}, *({"Authorization": value} for value in ("Bearer wrong", "Basic secret", "Bearer "))):
            assert [client.get(path, headers=headers).status_code for path in paths] == [401] * 3
            refused = client.post("/v1/chat/completions", json=HELLO, headers=headers)
            assert refused.status_code == 401 and refused.json()["error"]["type"] == "authentication_error"
        for body in (b"{", b" " * (LIMITS.max_body_bytes + 1)):  # refused for the key, before the body is read
            assert client.post("/v1/chat/completions", content=body).status_code == 401
        for scheme in ("bearer", "BEARER ", "  Bearer"):  # names of schemes have no case
            assert client.get("/v1/models", headers={"Authorization": f"{scheme} secret "}).status_code == 200
        good = {"Authorization": "Bearer secret"}
        assert [client.get(path, headers=good).status_code for path in paths] == [200] * 3
        assert client.post("/v1/chat/completions", json=HELLO, headers=good).status_code == 200
        assert client.get("/health").status_code == client.get("/").status_code == 200


def test_health_models_and_unknown_names(client: TestClient, script: Script) -> None:
    assert client.get("/health").json() == {"status": "ok"}
    script.healthy = False
    assert client.get("/health").status_code == 503 and "out of memory" in client.get("/health").text
    (model,) = client.get("/v1/models").json()["data"]
    assert model["id"] == NAME and model["longspec"] == {"method": "tree", "positions": POSITIONS}
    assert client.get("/v1/models/other").status_code == chat_status(client, model="other") == 404
    for path in ("/v1/files", "/docs", "/openapi.json", "/page.html", "/..%2f..%2fetc/passwd"):
        assert client.get(path).status_code == 404
    refused = client.get("/v1/chat/completions")
    assert refused.status_code == 405 and refused.headers["allow"] == "POST"
    for path in ("/", "/health", "/metrics", "/v1/models", f"/v1/models/{NAME}"):
        whole, head = client.get(path), client.head(path)
        assert head.status_code == whole.status_code and not head.content
        assert head.headers["content-type"] == whole.headers["content-type"]
        refused = client.delete(path)
        assert refused.status_code == 405 and set(refused.headers["allow"].split(", ")) == {"GET", "HEAD"}
    for path in ("/v1/responses", "/chat/completions", "/v1/embeddings"):
        assert "use POST /v1/chat/completions" in client.post(path, json={}).json()["error"]["message"]


def chat_status(client: TestClient, **fields: Any) -> int:
    return client.post("/v1/chat/completions", json={**HELLO, **fields}).status_code


def test_only_its_own_names_reach_a_server_without_a_key(script: Script) -> None:
    with TestClient(application(script, hosts=["localhost", "[::1]"]), base_url="http://localhost:8000") as client:
        assert client.get("/health").status_code == 200
        for host in ("[::1]:8000", "[::1]", "LocalHost", "localhost:", "localhost.:8000"):
            assert client.get("/health", headers={"host": host}).status_code == 200
        for host in ("page.example:8000", "localhost.example", "[::1].example", "", "localhost:8000:9", "x:localhost"):
            error = client.get("/health", headers={"host": host}).json()["error"]
            assert error["type"] == "invalid_request_error" and "localhost" in error["message"]


def test_the_tokenizer_is_served_as_vllm_does(client: TestClient) -> None:
    found = client.post("/tokenize", json={"prompt": "h\xe9", "add_special_tokens": False}).json()
    assert found == {"tokens": ids("h\xe9"), "count": 3, "max_model_len": POSITIONS}
    assert client.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "h\xe9"}
    info = client.get("/tokenizer_info").json()
    assert info["eos_token"] == "</s>" and info["chat_template"] == TOKENIZER.chat_template
    for tokens in ([-1], [VOCAB_SIZE], [2**40]):
        error = client.post("/detokenize", json={"tokens": tokens}).json()["error"]
        assert error["param"] == "tokens" and "the vocabulary has" in error["message"]


def test_metrics_tell_what_the_scheduler_and_the_requests_did(client: TestClient, script: Script) -> None:
    script.events = [said("a"), said("bcd"), Finished("length")]
    chat(client, **HELLO)
    lines = client.get("/metrics").text.splitlines()
    for line in (
        "longspec_queue_length 2.0",
        "longspec_running_rows 3.0",
        "longspec_acceptance_length 2.5",
        'longspec_finished_requests_total{reason="stop"} 5.0',
        "longspec_time_to_first_token_seconds_count 1.0",
        "longspec_inter_token_latency_seconds_count 3.0",
    ):
        assert line in lines, line


def test_a_failure_of_the_server_itself_is_a_500(script: Script) -> None:
    script.refusal, script.room = ZeroDivisionError("a defect"), 0
    with TestClient(application(script), raise_server_exceptions=False) as client:
        assert "its log has the cause" in chat(client, 500, **HELLO)["error"]["message"]


def test_the_page_loads_nothing_from_elsewhere(client: TestClient) -> None:
    response = client.get("/")
    policy = response.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert "http" not in response.text.replace("http-equiv", "").lower().partition("<body>")[0]
    assert " src=" not in response.text and "@import" not in response.text and "url(" not in response.text
    assert not [word for word in (" style=", " onclick=", "innerHTML", "eval(") if word in response.text]
