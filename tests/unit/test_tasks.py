"""Tasks: the exact prompts, which prompts are kept, and errors that name file, line and field."""

import json
from pathlib import Path

import pytest
from tiny_tokenizer import byte_tokenizer

from longspec.errors import UserError
from longspec.longbench.prompts import Selection, read_prompt, read_questions, select_prompts
from longspec.longbench.tasks import TASKS

LONGBENCH = ("gov_report", "qmsum", "multi_news", "lcc", "repobench-p")
PLAIN = ("", None, "plain", None)
"""Arguments of `read_questions` for plain text."""


def write_task(folder: Path, name: str, *lines: object) -> Path:
    """DIR/<name>.jsonl; what is not a string becomes JSON."""
    path = folder / f"{name}.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def record(**fields: object) -> dict[str, object]:
    """A LongBench record with all of its fields."""
    rest = {"answers": ["a"], "length": 3, "dataset": "d", "language": "en", "all_classes": None}
    return {"input": "question", "context": "context", **rest, "_id": "r0", **fields}


def selected(name: str, lengths: list[int], *limits: int) -> Selection:
    """Of prompts with these numbers of tokens."""
    questions = [(str(number), "x" * length) for number, length in enumerate(lengths)]
    return select_prompts(name, questions, byte_tokenizer(), *limits)


def test_answer_lengths_are_longbenchs_and_a_problem_of_aime24_is_its_own_prompt(tmp_path: Path) -> None:
    assert [TASKS[name].max_new_tokens for name in (*LONGBENCH, "aime24")] == [512, 512, 512, 64, 64, 20000]
    write_task(tmp_path, "aime24", {"id": 60, "problem": "Find $\\frac{1}{2}$.", "answer": "204"})
    assert read_questions("aime24", tmp_path, *PLAIN) == [("60", "Find $\\frac{1}{2}$.")]


LLAMA = ("<s>system\nYou are a helpful assistant</s>\n<s>user\n", "</s>\n<s>assistant\n")
QWEN2 = (
    "<|im_start|>system\nYou are a helpful assistant<|im_end|>\n<|im_start|>user\n",
    "<|im_end|>\n<|im_start|>assistant\n",
)
LONGBENCH_PROMPTS = {
    "gov_report": "You are given a report by a government agency. Write a one-page summary of the report.\n\n"
    "Report:\nC {0}\n\nNow, write a one-page summary of the report.\n\nSummary:",
    "qmsum": "You are given a meeting transcript and a query containing a question or instruction. Answer the query in "
    "one or more sentences.\n\nTranscript:\nC {0}\n\nNow, answer the query based on the above meeting transcript in "
    "one or more sentences.\n\nQuery: Q\nAnswer:",
    "multi_news": "You are given several news passages. Write a one-page summary of all news. \n\n"
    "News:\nC {0}\n\nNow, write a one-page summary of all the news.\n\nSummary:",
    "lcc": "Please complete the code given below. \nC {0}Next line of code:\n",
    "repobench-p": "Please complete the code given below. \nC {0}QNext line of code:\n",
}
PUBLISHED_CODE = "Please complete the code given below. \nC {0}Now, complete the code given."
WORDS = {"gov_report": "Summary:", "qmsum": "Answer:", "multi_news": "Summary:"}


def asked(folder: Path, task: str, family: str, tokenizer: object, chat_format: str, prompt: str | None = None) -> str:
    """The text that a record with context "C {0}" and input "Q" becomes."""
    write_task(folder, task, record(context="C {0}", input="Q"))
    questions = read_questions(task, folder, family, tokenizer, chat_format, prompt)
    (asked,) = select_prompts(task, questions, byte_tokenizer(), 0, 0, 10_000).prompts
    return byte_tokenizer().decode(asked.token_ids)


@pytest.mark.parametrize("task", LONGBENCH)
def test_prompts_of_the_published_pairs_are_the_published_ones_and_others_longbenchs(tmp_path: Path, task: str) -> None:
    """The word that opens the answer stands after the assistant's header alone, and only for Llama targets."""
    word = WORDS.get(task, "")
    user_turn = LONGBENCH_PROMPTS[task].removesuffix(word).rstrip("\n") if word else PUBLISHED_CODE
    assert asked(tmp_path, task, "llama", byte_tokenizer(), "published") == user_turn.join(LLAMA) + word
    assert asked(tmp_path, task, "qwen2", byte_tokenizer(), "published") == user_turn.join(QWEN2)
    tokenizer = byte_tokenizer("{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}")
    assert asked(tmp_path, task, "llama", tokenizer, "tokenizer") == f"[user]{LONGBENCH_PROMPTS[task]}"
    assert asked(tmp_path, task, "llama", byte_tokenizer(), "plain") == LONGBENCH_PROMPTS[task]


def test_prompts_of_the_users_own_file(tmp_path: Path) -> None:
    """In LongBench's form, other tasks included; the user's turn is the file's text alone."""
    file = tmp_path / "dataset2prompt.json"
    file.write_text(json.dumps({"qmsum": "{input} {{x}} {context}", "narrativeqa": "{story}", "aime24": "{problem}!"}))
    prompt = read_prompt(file, "qmsum")
    assert asked(tmp_path, "qmsum", "llama", byte_tokenizer(), "published", prompt) == "Q {x} C {0}".join(LLAMA)
    assert read_prompt(file, "aime24") == "{problem}!"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not a readable JSON file"),
        ('{"qmsum": "{context}"}', "has no prompt for lcc"),
        ('{"lcc": "{code}"}', r"lcc: not a template .* \{context\} or \{input\}"),
        ('{"lcc": {"prompt": "{context}"}}', "lcc: must be text with"),
        ('{"lcc": "Sum up {{context}}."}', "lcc: must be text with"),
        ('{"lcc": "{context} Sum up {context.x}."}', "lcc: not a template"),
        ('{"lcc": "{context} Sum up {context."}', "lcc: .*double other braces"),
    ],
)
def test_a_file_of_prompts_that_does_not_fit_is_named(tmp_path: Path, content: str, says: str) -> None:
    (tmp_path / "prompts.json").write_text(content)
    with pytest.raises(UserError, match=f"^--prompt_file: .*prompts.json.*{says}"):
        read_prompt(tmp_path / "prompts.json", "lcc")


def test_kept_prompts_are_longer_than_the_minimum_and_at_most_the_maximum() -> None:
    """1200 < n <= window - 2000: the lower end is left out, the upper one kept. AIME24 keeps every length."""
    selection = selected("lcc", [19, 20, 21, 30, 31, 90], 0, 20, 30)
    assert [sample.id for sample in selection.prompts] == ["2", "3"]
    assert (selection.too_short, selection.too_long) == (2, 2)
    line = "lcc: 2 prompts kept, 4 left out (2 of 20 tokens or fewer, 2 of more than 30 tokens)"
    assert selection.describe("lcc", 20, 30) == line
    assert len(selected("aime24", [2, 5000], 0, 1200, 2000).prompts) == 2
    with pytest.raises(UserError, match="0 prompts kept, 2 left out"):
        selected("lcc", [2, 3], 0, 1200, 2000)
    counted = selected("lcc", [5, 30, 6, 31, 32, 33], 2, 20, 10_000)  # --test_length 2
    assert [sample.id for sample in counted.prompts] == ["1", "3"] and counted.too_short == 2


@pytest.mark.parametrize(
    ("lines", "complaint"),
    [
        ([record(), '{"input": "x", '], r"lcc\.jsonl, line 2: not a JSON line"),
        ([record(context=7)], r"line 1: field 'context' must be a string"),
        ([""], r"lcc\.jsonl: no record"),
        (None, r"lcc\.jsonl: no such file"),
    ],
)
def test_bad_records_are_named(tmp_path: Path, lines: list[object] | None, complaint: str) -> None:
    """As is one for which the chat template fails."""
    if lines is not None:
        write_task(tmp_path, "lcc", *lines)
    with pytest.raises(UserError, match=complaint):
        read_questions("lcc", tmp_path, *PLAIN)
    write_task(tmp_path, "lcc", record())
    with pytest.raises(UserError, match=r"lcc\.jsonl, line 1: .*order"):
        read_questions("lcc", tmp_path, "llama", byte_tokenizer("{{ raise_exception('order') }}"), "tokenizer", None)
