"""The experiment's prompts: as long as their cell says, each about another document, with what really follows."""

import random
from pathlib import Path
from typing import Any

import pytest
from tiny_tokenizer import byte_tokenizer

from longspec.data.templates import encode_texts
from scripts.pipeline.files import read_jsonl
from scripts.pipeline.sources import SourceFile, heading
from scripts.pipeline.tokenizer import make_tokenizer
from scripts.reproduce.tasks import SHORTEST, TEMPLATES, Gauge, Maker, makers, training_records, write_tasks
from scripts.reproduce.text_files import Meeting, Solution, Texts

CONTEXTS = (256, 512, 1024)
ANSWER = 48


def body(number: int) -> str:
    """Some 9000 characters of lines that differ; some of them are blank."""
    chance = random.Random(number)
    words = ["alpha", "beta", "gamma", "delta", "value", "index", "result", "matrix"]
    lines = [
        f"    {chance.choice(words)}_{i} = {chance.choice(words)}({i}, {chance.randint(0, 9)})" for i in range(240)
    ]
    return "".join(f"{line}\n\n" if i % 9 == 0 else f"{line}\n" for i, line in enumerate(lines))


@pytest.fixture(scope="module")
def files() -> list[SourceFile]:
    paths = [f"package{n % 2}/file{n}.py" for n in range(8)]
    return [SourceFile(path, heading(path) + body(n)) for n, path in enumerate(paths)]


@pytest.fixture(scope="module")
def texts() -> Texts:
    talk = [Meeting(f"m{n}", body(n).replace("    ", "Ann: "), [(f"What of {n}?", f"It was {n}.")]) for n in range(5)]
    return Texts(talk, [Solution(f"s{n}", f"How much is {n} plus {n}?", f"{n}+{n} = {2 * n}") for n in range(60)])


@pytest.fixture(scope="module")
def tokenizer(files: list[SourceFile]) -> Any:
    return make_tokenizer([file.text for file in files], "llama", 500, 4096)


@pytest.fixture(scope="module")
def found(files: list[SourceFile], texts: Texts, tokenizer: Any) -> list[Maker]:
    return makers(files, texts, tokenizer, ANSWER)


@pytest.fixture(scope="module")
def tasks(found: list[Maker], tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tasks")
    write_tasks(folder, found, CONTEXTS, 3, seed=0)
    return folder


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("task", TEMPLATES)
def test_prompts_fill_their_context_and_are_about_different_documents(
    tasks: Path, tokenizer: Any, task: str, context: int
) -> None:
    """Counted as the target reads them: 85% to 100% of the context."""
    records = read_jsonl(tasks / f"{task}-{context}.jsonl")
    prompts = [TEMPLATES[task].prompt.format(**{f: r[f] for f in TEMPLATES[task].fields}) for r in records]
    lengths = [len(ids) for ids in encode_texts(prompts, tokenizer)]
    assert all(SHORTEST * context <= length <= context for length in lengths), lengths
    assert len({record["_id"] for record in records}) == len(records) == 3
    keys = {"input", "context", "answers", "length", "dataset", "language", "all_classes", "_id"}
    assert all(record.keys() == keys and record["dataset"] == task for record in records)


def test_code_goes_on_where_it_was_cut(found: list[Maker], files: list[SourceFile], tokenizer: Any) -> None:
    """The last lines of the prompt and what follows are neighbours in the file, and other files stand before it."""
    bodies = {file.path: file.text.split("\n", 1)[1] for file in files}
    chance = random.Random(1)
    for maker in found[:2]:
        for file in files:
            asked = maker.fitting(file, 512, chance)
            assert asked is not None
            before = (asked.input or asked.context).removeprefix(heading(file.path))
            assert before + asked.following in bodies[file.path]
            assert before.endswith("\n") and asked.following.endswith("\n") and not asked.following.startswith("\n")
            assert 0 < Gauge(tokenizer).count(asked.following) <= ANSWER
            if maker.task == "repobench-p":
                assert file.package in asked.context and file.path not in asked.context


def test_a_question_is_not_among_the_solved_ones(found: list[Maker], texts: Texts) -> None:
    maker = found[3]
    for solution in texts.solutions[:20]:
        asked = maker.fitting(solution, 512, random.Random(0))
        assert asked is not None and asked.context.count("Question:") > 5
        assert f"Question: {solution.question}" not in asked.context


def test_training_records_have_the_same_form_at_every_length(found: list[Maker], tokenizer: Any) -> None:
    records = training_records(found, CONTEXTS, count=2, seed=3)
    assert records == training_records(found, CONTEXTS, count=2, seed=3)
    assert len(records) == 2 * len(CONTEXTS) * len(TEMPLATES)
    lengths = [len(ids) for ids in encode_texts([record["source"] for record in records], tokenizer)]
    for context in CONTEXTS:
        assert sum(SHORTEST * context <= length <= context for length in lengths) == 2 * len(TEMPLATES)
    for task, template in TEMPLATES.items():
        opening = template.prompt.split("{", 1)[0] or "Question: "
        ours = [record for record in records if record["source"].startswith(opening)]
        assert len(ours) >= 2 * len(CONTEXTS), task
    assert all(record["target"].strip() for record in records)


def test_without_texts_there_are_the_two_code_tasks(files: list[SourceFile], tokenizer: Any, tmp_path: Path) -> None:
    write_tasks(tmp_path, makers(files, Texts(), tokenizer, ANSWER), CONTEXTS[:1], 2, seed=0)
    assert {path.name for path in tmp_path.iterdir()} == {"lcc-256.jsonl", "repobench-p-256.jsonl"}


def test_a_cell_without_fitting_documents_is_said(
    files: list[SourceFile], tokenizer: Any, tmp_path: Path, capsys
) -> None:
    write_tasks(tmp_path, makers(files, Texts(), tokenizer, ANSWER)[:1], [8192], 2, seed=0)
    assert not list(tmp_path.iterdir())
    assert "lcc at 8192 tokens: 0 prompts, not 2" in capsys.readouterr().out


def test_head_and_tail_are_whole_lines_within_their_tokens() -> None:
    gauge, text = Gauge(byte_tokenizer()), "one\ntwo\nthree\n"
    assert gauge.head(text, 9) == "one\ntwo\n"
    assert gauge.tail(text, 10) == "two\nthree\n"
    assert gauge.tail(text, 9) == "three\n"
    assert gauge.head(text, 100) == gauge.tail(text, 100) == text
    assert gauge.head(text, 2) == gauge.tail(text, 2) == gauge.head(text, 0) == gauge.tail(text, 0) == ""
