"""Streamed text is the text, and no piece of it ends inside a character."""

from types import SimpleNamespace

from tiny_tokenizer import byte_tokenizer

from longspec.inference.detokenizer import REPLACEMENT, Detokenizer

TEXT = " Zwölf Boxkämpfer, 中文 and 🙂  two spaces"


def test_pieces_are_whole_characters_and_make_up_the_text() -> None:
    tokenizer = byte_tokenizer()
    tokens = tokenizer(TEXT, add_special_tokens=False)["input_ids"]
    stream = Detokenizer(tokenizer)
    pieces = [stream.add(token) for token in [*tokens, tokenizer.eos_token_id]]
    assert "".join(pieces) + stream.end() == TEXT
    assert not any(REPLACEMENT in piece for piece in pieces) and "🙂" in pieces and pieces[-1] == ""


def test_a_tokenizer_that_wraps_no_other_is_read_itself() -> None:
    tokenizer = byte_tokenizer()
    stream = Detokenizer(SimpleNamespace(decode=tokenizer.decode))
    pieces = [stream.add(token) for token in tokenizer("a , b</s>é", add_special_tokens=False)["input_ids"]]
    assert "".join(pieces) == "a , bé"
