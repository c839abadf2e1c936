"""Answers of the web application: text, stop strings, chunks, log-probabilities and errors, from given events."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from server_script import HELLO, TOKENIZER, Script, application, chat, events, ids, said
from starlette.testclient import TestClient
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from longspec.inference.detokenizer import REPLACEMENT, Detokenizer
from longspec.inference.engine.requests import Finished, PromptScores, Timings, Tokens, Tree
from longspec.inference.server.answer_text import AnswerText, Piece
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
    contents: dict[str | tuple[str, ...], str] = {"</s>": "one", "e</s>": "on", "</s><s>t": "one", "<s>": "one"}
    contents |= {"</s>tw": "onetwo", "s": "onetwo", ("x</s>", "s"): "onetwo", ("o</s>", "tw"): "one"}
    for stop, expected in contents.items():
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
    end = Finished("length", timings=Timings(decode_s=2.0))
    script.events = [said("a"), Tokens(ids("hé"), ["draft", "target", "target"], tree=tree), end]
    script.cached = [4]
    chunks = events(client, **HELLO, stream_options={"include_usage": True})
    first, *deltas = [chunk["choices"][0]["delta"] for chunk in chunks[:-1]]
    assert first == {"role": "assistant", "content": ""} and deltas == [{"content": "a"}, {"content": "hé"}, {}]
    assert {chunk["object"] for chunk in chunks} == {"chat.completion.chunk"}
    assert len({chunk["id"] for chunk in chunks}) == 1 and "longspec" not in str(chunks)
    assert chunks[-1]["choices"] == [] and chunks[0]["usage"] is None
    assert chunks[-1]["usage"]["completion_tokens"] == 4
    assert chunks[-1]["usage"]["prompt_tokens_details"] == {"cached_tokens": 4}
    *_, round_chunk, end = events(client, **HELLO, longspec={"tokens": True})
    told = [(token["text"], token["origin"]) for token in round_chunk["longspec"]["tokens"]]
    assert told == [("h", "draft"), ("", "target"), ("é", "target")]
    known = {"texts": ["x", "h", "z"], "parents": tree.parents, "accepted": tree.accepted, "origins": tree.origins}
    assert round_chunk["longspec"]["tree"] == known and end["longspec"]["timings"]["decode_s"] == 2


def test_logprobs_are_those_of_the_tokens_that_are_shown(client: TestClient, script: Script) -> None:
    script.events = [said("ab", logprobs=[-1.0, -2.0]), said("cd", logprobs=[-3.0, -4.0]), Finished("length")]
    content = chat(client, **HELLO, logprobs=True, stop="d")["choices"][0]["logprobs"]["content"]
    letters = [(letter, -1 - number, [ord(letter)]) for number, letter in enumerate("abc")]
    assert [(entry["token"], entry["logprob"], entry["bytes"]) for entry in content] == letters
    fields = chat(client, path="completions", prompt="x", logprobs=0)["choices"][0]["logprobs"]
    assert (fields["tokens"], fields["token_logprobs"]) == (list("abcd"), [-1, -2, -3, -4])
    assert (fields["top_logprobs"], fields["text_offset"]) == (None, [0, 1, 2, 3])
    assert chat(client, **HELLO)["choices"][0]["logprobs"] is None


def test_alternatives_are_told_by_text_or_bytes(client: TestClient, script: Script) -> None:
    """A token that is a part of a character has its own bytes."""
    a, _, part = ids("ab\xe9")[:3]
    script.events = [said("b", logprobs=[-2.0], alternatives=[[(a, -0.5), (part, -1.0), (part + 1, -1.5)]])]
    script.events += [Finished("length")]
    (entry,) = chat(client, **HELLO, logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    expected = [("a", -0.5, [97]), ("\ufffd", -1.0, [0xC3]), ("\ufffd", -1.5, [0xC4])]
    assert [(best["token"], best["logprob"], best["bytes"]) for best in entry["top_logprobs"]] == expected
    fields = chat(client, path="completions", prompt="x", logprobs=3)["choices"][0]["logprobs"]
    assert fields["top_logprobs"] == [{"a": -0.5, r"bytes:\xc3": -1.0, r"bytes:\xc4": -1.5, "b": -2.0}]
    assert [(request.logprobs, request.alternatives) for request in script.submitted] == [(True, 2), (True, 3)]


def test_a_token_of_sentencepiece_keeps_its_space(script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    words = Tokenizer(models.BPE(vocab={"<unk>": 0, "\u2581a": 1, "\u2581b": 2, "b": 3}, merges=[], unk_token="<unk>"))
    words.pre_tokenizer, words.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    monkeypatch.setattr("server_script.TOKENIZER", PreTrainedTokenizerFast(tokenizer_object=words))
    answer = Tokens([2, 3], ["target"] * 2, logprobs=[-1.0, -2.0], alternatives=[[(3, -0.5)], []])
    script.events = [answer, Finished("length")]
    with TestClient(application(script)) as client:
        fields = chat(client, path="completions", prompt=[1], logprobs=1)["choices"][0]["logprobs"]
    assert fields["tokens"] == [" b", "b"] and fields["top_logprobs"][0] == {" b": -1.0, "b": -0.5}


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
    script.events = [PromptScores([-1.0], [[(x, -0.5)]]), PromptScores([-2.0], [[(y, -2.0)]])]
    script.events += [said("d", logprobs=[-3.0], alternatives=[[(x, -0.1)]]), Finished("stop")]
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


def streamed(text: str, stops: list[str], round_size: int = 1) -> tuple[list[list[Piece]], AnswerText]:
    """The pieces after each round, and those of the end."""
    answer, tokens, released = AnswerText(TOKENIZER, stops), ids(text), []
    for start in range(0, len(tokens), round_size):
        part = tokens[start : start + round_size]
        released.append(answer.add(Tokens(part, ["draft"] * len(part))))
        if answer.stopped:
            break
    return [*released, answer.end()], answer


def joined(rounds: list[list[Piece]]) -> str:
    return "".join(piece.text for pieces in rounds for piece in pieces)


def text_before(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first; of those complete together, the one that begins first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@given(st.text("abé", max_size=12), st.lists(st.text("abé", min_size=1, max_size=4), max_size=3))
def test_a_text_ends_before_its_first_stop_string(text: str, stops: list[str]) -> None:
    rounds, answer = streamed(text, stops)
    assert joined(rounds) == text_before(text, stops)
    assert answer.stopped == any(stop in text for stop in stops)


@given(st.text("ab", max_size=12), st.text("ab", min_size=1, max_size=4), st.integers(1, 5))
def test_nothing_that_may_belong_to_a_stop_string_is_released(text: str, stop: str, size: int) -> None:
    """After each round the released text can still be followed by a stop string that begins right after it."""
    rounds, _ = streamed(text, [stop], size)
    for count in range(1, len(rounds)):
        released, seen = joined(rounds[:count]), text[: count * size]
        assert seen.startswith(released) and stop not in released
        assert not any(stop.startswith(seen[start:]) for start in range(min(len(released), len(seen)))) or stop in seen


def test_text_is_held_back_no_longer_than_needed() -> None:
    rounds, _ = streamed("abcabd", ["abd"])
    assert [joined([pieces]) for pieces in rounds] == ["", "", "abc", "", "", "", ""]


def test_a_character_is_released_whole() -> None:
    rounds, answer = streamed("é€", [])
    assert [joined([pieces]) for pieces in rounds] == ["", "é", "", "", "€", ""]
    assert [piece.id for pieces in rounds for piece in pieces] == ids("é€") and not answer.stopped
    tokens, cut = ids("a€")[:-1], AnswerText(TOKENIZER)
    assert joined([cut.add(Tokens(tokens, ["target"] * len(tokens)))]) == "a"
    (rest,) = cut.end()
    assert rest.text == "\ufffd" and rest.id is None


def test_streamed_pieces_are_whole_characters_and_make_up_the_text() -> None:
    streamed, text = Detokenizer(TOKENIZER), " Zwölf Boxkämpfer, 中文 and 🙂  two spaces"
    pieces = [streamed.add(token) for token in [*ids(text), ids("é")[0], *[TOKENIZER.eos_token_id] * 9]]
    assert "".join(pieces) + streamed.held == text + REPLACEMENT
    assert not any(REPLACEMENT in piece for piece in pieces) and "🙂" in pieces and pieces[-1] == ""
    assert len(streamed._tokens) == 2, "special tokens are decoded again with each token"


SPLIT = [*ids("a"), *ids("é")[:1] * 900]
BYTES = Tokenizer(models.BPE(vocab={f"<0x{byte:02X}>": byte for byte in range(256)}, merges=[]))
BYTES.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])  # a broken byte breaks its whole run
FALLBACK = PreTrainedTokenizerFast(tokenizer_object=BYTES)


@pytest.mark.parametrize(
    ("tokenizer", "tokens"), [(TOKENIZER, SPLIT), (TOKENIZER, [*SPLIT, *ids("中")]), (FALLBACK, [0xFF, *b"\n" * 900])]
)
def test_broken_text_takes_linear_time(tokenizer: Any, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """It follows what may begin a stop string, and is searched when it grows."""
    answer, decoded, searched = AnswerText(tokenizer, ["ab"]), list[int](), list[int]()
    decode, unsure, text = answer._detokenizer._decode, answer._unsure, tokenizer.decode(tokens)
    monkeypatch.setattr(answer._detokenizer, "_decode", lambda ids: decoded.append(len(ids)) or decode(ids))
    monkeypatch.setattr(answer, "_unsure", lambda: searched.append(len(answer._held)) or unsure())
    assert joined([*(answer.add(Tokens([token], ["draft"])) for token in tokens), answer.end()]) == text
    assert sum(decoded) < 20 * len(tokens) and sum(searched) < 20 * len(tokens)
