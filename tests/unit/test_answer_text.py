"""Text of an answer that arrives token by token: stop strings and incomplete characters."""

from hypothesis import given
from hypothesis import strategies as st
from tiny_tokenizer import byte_tokenizer

from longspec.inference.detokenizer import REPLACEMENT, Detokenizer
from longspec.inference.engine.requests import Origin, Tokens
from longspec.inference.server.answer_text import AnswerText, Piece

TOKENIZER = byte_tokenizer()


def tokens_of(text: str) -> list[int]:
    return TOKENIZER(text, add_special_tokens=False)["input_ids"]


def stream(text: str, stops: list[str], round_size: int = 1) -> tuple[list[list[Piece]], AnswerText]:
    """The pieces after each round, and those of the end."""
    answer, ids, released = AnswerText(TOKENIZER, stops), tokens_of(text), []
    for start in range(0, len(ids), round_size):
        part = ids[start : start + round_size]
        released.append(answer.add(Tokens(part, ["draft"] * len(part))))
        if answer.stopped:
            break
    return [*released, answer.end()], answer


def joined(rounds: list[list[Piece]]) -> str:
    return "".join(piece.text for pieces in rounds for piece in pieces)


def expected(text: str, stops: list[str]) -> str:
    """The text before the stop string that is complete first; of those complete together, the one that begins first."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)]
    return text


@given(st.text("abé", max_size=12), st.lists(st.text("abé", min_size=1, max_size=4), max_size=3))
def test_a_text_ends_before_its_first_stop_string(text: str, stops: list[str]) -> None:
    rounds, answer = stream(text, stops)
    assert joined(rounds) == expected(text, stops)
    assert answer.stopped == any(stop in text for stop in stops)


@given(st.text("ab", max_size=12), st.text("ab", min_size=1, max_size=4), st.integers(1, 5))
def test_nothing_that_may_belong_to_a_stop_string_is_released(text: str, stop: str, size: int) -> None:
    """After each round the released text can still be followed by a stop string that begins right after it."""
    rounds, _ = stream(text, [stop], size)
    for count in range(1, len(rounds)):
        released, seen = joined(rounds[:count]), text[: count * size]
        assert seen.startswith(released) and stop not in released
        assert not any(stop.startswith(seen[start:]) for start in range(min(len(released), len(seen)))) or stop in seen


def test_text_is_held_back_no_longer_than_needed() -> None:
    rounds, _ = stream("abcabd", ["abd"])
    assert [joined([pieces]) for pieces in rounds] == ["", "", "abc", "", "", "", ""]


def test_a_character_is_released_whole() -> None:
    rounds, answer = stream("é€", [])
    assert [joined([pieces]) for pieces in rounds] == ["", "é", "", "", "€", ""]
    assert [piece.id for pieces in rounds for piece in pieces] == tokens_of("é€") and not answer.stopped
    ids = tokens_of("a€")[:-1]
    cut = AnswerText(TOKENIZER)
    assert joined([cut.add(Tokens(ids, ["target"] * len(ids)))]) == "a"
    (rest,) = cut.end()
    assert rest.text == "\ufffd" and rest.id is None


def test_streamed_pieces_are_whole_characters_and_make_up_the_text() -> None:
    stream, text = Detokenizer(TOKENIZER), " Zwölf Boxkämpfer, 中文 and 🙂  two spaces"
    pieces = [stream.add(token) for token in [*tokens_of(text), TOKENIZER.eos_token_id]]
    assert "".join(pieces) + stream.end() == text
    assert not any(REPLACEMENT in piece for piece in pieces) and "🙂" in pieces and pieces[-1] == ""


def test_origins_and_probabilities_stay_with_their_tokens() -> None:
    answer = AnswerText(TOKENIZER, ["c"])
    origins: list[Origin] = ["draft", "target", "draft", "target"]
    pieces = answer.add(Tokens(tokens_of("abcd"), origins, [-1.0, -2.0, -3.0, -4.0]))
    assert [(piece.text, piece.origin, piece.logprob) for piece in pieces] == [
        ("a", "draft", -1.0),
        ("b", "target", -2.0),
    ]
