"""Answers of the web application: text, chunks, log-probabilities and errors, from given events of a scheduler."""

import json
from typing import Any

import pytest
from server_script import HELLO, TOKENIZER, Script, chat, events, ids, said
from starlette.testclient import TestClient

from longspec.inference.engine.requests import Finished, PromptScores, Timings, Tokens, Tree
from longspec.inference.server.replies import server_sent_event


def test_a_stop_string_ends_the_answer_and_the_row(client: TestClient, script: Script) -> None:
    script.events = [said("one t"), said("wo three"), Finished("length")]
    answer = chat(client, **HELLO, stop="two", logprobs=False)
    assert answer["choices"][0]["message"]["content"] == "one "
    assert answer["usage"]["completion_tokens"] == len("one two"), "tokens after the stop string are not counted"
    assert answer["choices"][0]["finish_reason"] == "stop" and script.cancelled == script.submitted
    assert script.reasons == ["stop"]
    chunks = events(client, **HELLO, stop=["two"])
    texts = [choice["delta"].get("content", "") for chunk in chunks for choice in chunk["choices"]]
    assert "".join(texts) == "one " and chunks[-1]["choices"][0]["finish_reason"] == "stop"
    assert chat(client, **HELLO, stop=["three!"])["choices"][0]["message"]["content"] == "one two three"
    # A special token is no part of the text, but a stop string can name it, with text around it.
    script.events = [said("one"), said("</s>"), said("<s>two"), Finished("length")]
    for stop, expected in (("</s>", "one"), ("e</s>", "on"), ("</s><s>t", "one"), ("<s>", "one"), ("</s>tw", "onetwo")):
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
    """A token that is a part of a character has its own bytes."""
    a, _, part = ids("ab\xe9")[:3]
    script.events = [said("b", logprobs=[-2.0], alternatives=[[(a, -0.5), (part, -1.0), (part + 1, -1.5)]])]
    script.events += [Finished("length")]
    (entry,) = chat(client, **HELLO, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    assert [(best["token"], best["logprob"], best["bytes"]) for best in entry["top_logprobs"]] == [
        ("a", -0.5, [97]),
        ("\ufffd", -1.0, [0xC3]),
        ("\ufffd", -1.5, [0xC4]),
    ]
    fields = chat(client, path="completions", prompt="x", logprobs=3)["choices"][0]["logprobs"]
    assert fields["top_logprobs"] == [{"a": -0.5, "\ufffd": -1.0, "b": -2.0}]
    assert [(request.logprobs, request.alternatives) for request in script.submitted] == [(True, 2), (True, 3)]


@pytest.mark.parametrize(
    ("name", "content"), [("<0xE9>", b"\xe9"), ("\u0120\xc3", b" \xc3"), ("a\ufffd", b"\xef\xbf\xbd")]
)
def test_bytes_of_a_token_are_those_of_its_name_in_the_vocabulary(
    client: TestClient, script: Script, monkeypatch: pytest.MonkeyPatch, name: str, content: bytes
) -> None:
    """Of SentencePiece, of byte-level BPE, and of a token that contains U+FFFD itself."""
    monkeypatch.setattr(TOKENIZER, "convert_ids_to_tokens", lambda token: name)
    script.events = [Tokens(ids("\xe9")[:1], ["target"], logprobs=[-1.0]), Finished("length")]
    (entry,) = chat(client, **HELLO, logprobs=True)["choices"][0]["logprobs"]["content"]
    assert bytes(entry["bytes"]) == content


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
