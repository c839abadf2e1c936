"""Prompts to the letter of the published formats, and token ids with exactly one BOS."""

import pytest
from tiny_tokenizer import byte_tokenizer
from tokenizers.processors import TemplateProcessing

from longspec.data.records import RecordError
from longspec.data.templates import chat_prompt, encode_texts, render
from longspec.errors import UserError

LLAMA = "<s>system\nYou are a helpful assistant</s>\n<s>user\nHi {x}</s>\n<s>assistant\n"
QWEN2 = (
    "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n"
    "<|im_start|>user\nHi {x}<|im_end|>\n<|im_start|>assistant\n"
)
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def sample(kind, prompt, answer):
    return {"id": "1", "kind": kind, "prompt": prompt, "answer": answer}


def bos_tokenizer(eos_too=False):
    tokenizer = byte_tokenizer()
    marks = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    single = "<s> $A </s>" if eos_too else "<s> $A"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=marks)
    return tokenizer


@pytest.mark.parametrize(("family", "expected"), [("llama", LLAMA), ("qwen2", QWEN2)])
def test_the_published_format_of_each_family(family, expected):
    assert chat_prompt("Hi {x}", family) == expected
    assert chat_prompt("Hi {x}", family, answer_prefix="Answer:") == expected + "Answer:"


def test_the_tokenizers_own_chat_template():
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    assert chat_prompt("Hi", "llama", tokenizer, "tokenizer", "Summary:") == "[user]Hi[assistant]Summary:"
    prompt, answer = render(sample("report", "Costs rose.", "They rose."), "llama", tokenizer, "tokenizer")
    assert prompt.endswith("[assistant]") and answer == "They rose."
    with pytest.raises(RecordError, match="no tools"):
        render(sample("messages", [{"role": "tool", "content": "x"}], "a"), "llama", tokenizer, "tokenizer")


@pytest.mark.parametrize(
    ("family", "chat_format", "says"),
    [
        ("gpt2", "published", "unknown model family 'gpt2': use one of llama, qwen2"),
        ("llama", "alpaca", "unknown chat_format 'alpaca'"),
        ("llama", "tokenizer", "needs a tokenizer with a chat template"),
    ],
)
def test_unknown_formats_are_named(family, chat_format, says):
    with pytest.raises(UserError, match=says):
        chat_prompt("Hi", family, byte_tokenizer(), chat_format)


def test_a_conversation_keeps_its_turns_and_its_own_system_turn():
    turns = [
        {"role": "user", "content": "1?"},
        {"role": "assistant", "content": "1"},
        {"role": "user", "content": "2?"},
    ]
    body = "<s>user\n1?</s>\n<s>assistant\n1</s>\n<s>user\n2?</s>\n<s>assistant\n"
    default = "<s>system\nYou are a helpful assistant</s>\n"
    assert render(sample("messages", turns, "2"), "llama", None, "published") == (default + body, "2")
    own = [{"role": "system", "content": "Be brief."}, *turns]
    assert render(sample("messages", own, "2"), "llama", None, "published")[0] == "<s>system\nBe brief.</s>\n" + body


@pytest.mark.parametrize("kind", ["article", "report", "document", "transcript"])
def test_summaries_have_an_instruction_and_llamas_lead_in(kind):
    text = "Costs {prompt} rose {0}."
    for family, prefix, answer in (("llama", "Summary:", " They rose."), ("qwen2", "", "They rose.")):
        prompt, learnt = render(sample(kind, text, "They rose."), family, None, "published")
        end = {"llama": "<s>assistant\n", "qwen2": "<|im_start|>assistant\n"}[family] + prefix
        assert prompt.endswith(end)
        assert prompt.count(text) == 1 and len(prompt) > len(chat_prompt(text, family)) + 40
        assert learnt == answer


def test_questions_are_asked_bare_and_continuations_and_text_without_a_chat():
    for kind in ("source", "problem"):
        assert render(sample(kind, "Hi {x}", "a"), "llama", None, "published") == (LLAMA, "a")
    assert render(sample("prefix", "def f():", " pass"), "llama", None, "published") == ("def f():", " pass")
    assert render(sample("text", None, "A book."), "llama", None, "published") == ("", "A book.")


@pytest.mark.parametrize("eos_too", [False, True])
def test_one_bos_never_two_and_no_eos(eos_too):
    tokenizer = bos_tokenizer(eos_too)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    plain, chat = encode_texts(["abc", chat_prompt("Hi", "llama")], tokenizer)
    assert plain == [bos, *byte_tokenizer()("abc")["input_ids"]]
    assert chat[0] == bos and chat[1] != bos
    assert chat.count(bos) == 3 and plain[-1] != eos


def test_a_tokenizer_that_uses_no_bos_gets_none():
    tokenizer = byte_tokenizer()
    assert encode_texts(["abc"], tokenizer) == [tokenizer("abc")["input_ids"]]
    assert encode_texts([], tokenizer) == []
