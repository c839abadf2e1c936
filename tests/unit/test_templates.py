"""Prompts in the published formats, and token ids with exactly one BOS."""

import pytest
from tiny_tokenizer import byte_tokenizer, merging_tokenizer
from tokenizers.processors import TemplateProcessing

from longspec.data.prompts import user_turn_marks
from longspec.data.records import RecordError, located
from longspec.data.target_format import answer_end, resolve_chat_format
from longspec.data.templates import chat_prompt, check_templates, encode_pairs, encode_texts, render
from longspec.errors import UserError
from longspec.models.target_files import set_template_arguments

LLAMA = "<s>system\nYou are a helpful assistant</s>\n<s>user\nHi {x}</s>\n<s>assistant\n"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}"
    "[{{ m.role }}]{{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
TURNS = [{"role": role, "content": text} for role, text in (("user", "1?"), ("assistant", "1"), ("user", "2?"))]


def sample(kind, prompt, answer):
    return {"id": "1", "kind": kind, "prompt": prompt, "answer": answer}


def bos_tokenizer(eos_too=False):
    tokenizer = byte_tokenizer()
    marks = [("<s>", tokenizer.bos_token_id), ("</s>", tokenizer.eos_token_id)]
    single = "<s> $A </s>" if eos_too else "<s> $A"
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single=single, special_tokens=marks)
    return tokenizer


def test_the_tokenizers_own_chat_template():
    tokenizer = byte_tokenizer(TEMPLATE)
    assert chat_prompt("Hi", "llama", tokenizer, "tokenizer", "Summary:") == "[user]Hi[assistant]Summary:"
    prompt, answer = render(sample("report", "Costs rose.", "They rose."), "llama", tokenizer, "tokenizer")
    assert prompt.endswith("[assistant]") and answer == "They rose."
    with pytest.raises(RecordError, match="no tools"):
        render(sample("messages", [{"role": "tool", "content": "x"}], "a"), "llama", tokenizer, "tokenizer")
    tokenizer.chat_template = TEMPLATE.replace("[assistant]", "[assistant]<think>\n")
    for answer in ("<think>\nSo.</think>1", "<think>So.</think>1", "So.</think>1"):
        assert render(sample("prompt", "1?", answer), "llama", tokenizer, "tokenizer")[1] == "So.</think>1"


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ raise_exception('only users') }}", r"\(only users\)"),
        ("{{ 9 // (messages | length - 1) }}", "ZeroDivisionError"),
        ("{% if %}", "TemplateSyntaxError"),
    ],
)
def test_any_error_of_a_chat_template_is_one_line_with_its_place(template, reason):
    tokenizer = byte_tokenizer(template)
    problem = rf"^f, line 3: the tokenizer's chat template fails on .*{reason}"
    with pytest.raises(UserError, match=problem) as error, located("f", 3):
        render(sample("prompt", "Hi", "a"), "llama", tokenizer, "tokenizer")
    assert "\n" not in str(error.value)
    assert answer_end(tokenizer, [], "tokenizer") == tokenizer.eos_token_id
    with pytest.raises(UserError, match=reason):
        user_turn_marks(tokenizer)


def test_the_default_of_several_chat_templates_is_used():
    """With its variables. Without a default one the names are listed."""
    tokenizer = byte_tokenizer({"default": TEMPLATE + "{{ think }}", "rag": "rag"})
    set_template_arguments(tokenizer, {"think": "!"})
    assert resolve_chat_format("auto", "target", "llama", tokenizer) == "tokenizer"
    assert chat_prompt("Hi", "llama", tokenizer, "tokenizer") == "[user]Hi[assistant]!"
    assert tokenizer.chat_template["rag"] == "rag"
    tokenizer.chat_template = {"rag": TEMPLATE, "tool_use": TEMPLATE}
    for use in (
        lambda: resolve_chat_format("auto", "target", "llama", tokenizer),
        lambda: set_template_arguments(tokenizer, {"m": "!"}),
        lambda: user_turn_marks(tokenizer),
    ):
        with pytest.raises(UserError, match="none named 'default': rag, tool_use;"):
            use()


def test_conversations_keep_their_turns_questions_are_asked_bare_and_text_without_a_chat():
    """A conversation keeps its own system turn, too."""
    body = "<s>user\n1?</s>\n<s>assistant\n1</s>\n<s>user\n2?</s>\n<s>assistant\n"
    default = "<s>system\nYou are a helpful assistant</s>\n"
    assert render(sample("messages", TURNS, "2"), "llama", None, "published") == (default + body, "2")
    own = [{"role": "system", "content": "Be brief."}, *TURNS]
    assert render(sample("messages", own, "2"), "llama", None, "published")[0] == "<s>system\nBe brief.</s>\n" + body
    for kind in ("source", "problem", "instruction", "prompt"):
        assert render(sample(kind, "Hi {x}", "a"), "llama", None, "published") == (LLAMA, "a")
    assert render(sample("prefix", "def f():", " pass"), "llama", None, "published") == ("def f():", " pass")
    assert render(sample("text", None, "A book."), "llama", None, "published") == ("", "A book.")


@pytest.mark.parametrize("kind", ["article", "report", "document", "transcript"])
def test_summaries_have_an_instruction_and_llamas_lead_in(kind):
    text = "Costs {prompt} rose {0}."
    for family, prefix, answer in (("llama", "Summary:", " They rose."), ("qwen2", "", "They rose.")):
        prompt, learnt = render(sample(kind, text, "They rose."), family, None, "published")
        end = {"llama": "<s>assistant\n", "qwen2": "<|im_start|>assistant\n"}[family] + prefix
        assert prompt.endswith(end) and learnt == answer
        assert prompt.count(text) == 1 and len(prompt) > len(chat_prompt(text, family, None, "published")) + 40


def test_pairs_are_asked_one_by_one_each_answer_with_its_lead_in():
    texts = [("user", "First {x}."), ("assistant", " One."), ("user", "Second.")]
    pairs = sample("article", [{"role": role, "content": content} for role, content in texts], "Two.")
    own, answer = render(pairs, "llama", None, "published", {"article": "Sum up:\n{prompt}\nNow {{do}} it."})
    assert own == (
        "<s>system\nYou are a helpful assistant</s>\n"
        "<s>user\nSum up:\nFirst {x}.\nNow {do} it.</s>\n<s>assistant\n One.</s>\n"
        "<s>user\nSum up:\nSecond.\nNow {do} it.</s>\n<s>assistant\n"
    )
    assert answer == "Two."
    built_in, answer = render(pairs, "llama", None, "published")
    assert built_in.count("<s>assistant\nSummary: One.</s>\n") == 1 and built_in.count("Now write the abstract.") == 2
    assert built_in.endswith("<s>assistant\nSummary:") and answer == " Two."


def test_plain_text_has_no_marks():
    assert chat_prompt("Hi {x}", "gpt2", None, "plain") == "Hi {x}"
    assert render(sample("messages", TURNS, "2"), "llama", None, "plain") == ("1?\n\n1\n\n2?", "\n\n2")
    own = render(sample("report", "Costs rose.", "Up."), "llama", None, "plain", {"report": "{prompt} So?"})
    assert own == ("Costs rose. So?", "\n\nUp.")
    turns = [{"role": "user", "content": "1?"}, {"role": "tool", "content": "1"}]
    for chat_format in ("published", "plain"):
        with pytest.raises(RecordError, match=r"field 'messages\[1\]\.role' is 'tool', which chat_format"):
            render(sample("messages", turns, "1"), "llama", None, chat_format)


def test_templates_are_for_kinds_with_a_prompt():
    assert check_templates({"report": "{prompt}"}, "data.templates") == {"report": "{prompt}"}
    for kind in ("text", "prefix", "messages", "gov_report"):
        with pytest.raises(UserError, match=rf"data\.templates\.{kind}: no such kind of record; use instruction, "):
            check_templates({kind: "{prompt}"}, "data.templates")
    with pytest.raises(UserError, match=r"data\.templates\.report: not a template .*; use \{prompt\}"):
        check_templates({"report": "{prompt[a]}"}, "data.templates")


@pytest.mark.parametrize("eos_too", [False, True])
def test_one_bos_never_two_and_no_eos(eos_too):
    tokenizer = bos_tokenizer(eos_too)
    bos, eos = tokenizer.bos_token_id, tokenizer.eos_token_id
    plain, chat = encode_texts(["abc", chat_prompt("Hi", "llama", None, "published")], tokenizer)
    assert plain == [bos, *byte_tokenizer()("abc")["input_ids"]]
    assert chat[0] == bos and chat[1] != bos
    assert chat.count(bos) == 3 and plain[-1] != eos
    unused = byte_tokenizer()
    assert encode_texts(["abc"], unused) == [unused("abc")["input_ids"]] and encode_texts([], unused) == []


@pytest.mark.parametrize("tokenizer", [byte_tokenizer(), bos_tokenizer(), merging_tokenizer()])
def test_a_prompt_has_the_tokens_that_it_has_alone(tokenizer):
    """Also where the answer changes the prompt's last ones, and after unknown text, which has a special token's id."""
    prompts = ["", "a", "xa", "b<s>xa", "<s>a", "a<s>", LLAMA, "é<s>é", "<", "a<s"]
    pairs = [(prompt, answer) for prompt in prompts for answer in ("", "b", ">b", ">", "<s>b", "é<s>a", " x")]
    texts = [prompt + answer for prompt, answer in pairs], [prompt for prompt, _ in pairs]
    assert encode_pairs(pairs, tokenizer) == tuple(encode_texts(one, tokenizer) for one in texts)
